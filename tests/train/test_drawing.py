"""The order of sequences in steps, with and without grouping by length, and drawing ahead of the step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dflash.train.data import Grouping, epoch_order, grouped, visits

LENGTHS = np.random.default_rng(5).integers(8, 300, size=103)


@pytest.mark.parametrize("per_step", [1, 4, 7])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_grouping_permutes_an_epoch(per_step: int, epoch: int) -> None:
    """Guards against a sequence that grouping loses or shows twice."""
    order = epoch_order(len(LENGTHS), seed=3, epoch=epoch)
    after = grouped(order, Grouping(LENGTHS, per_step, window=5), seed=3, epoch=epoch)
    assert sorted(after.tolist()) == list(range(len(LENGTHS)))
    assert per_step == 1 or after.tolist() != order.tolist()


@pytest.mark.parametrize("start", [0, 1, 8, 103, 150])
def test_grouped_visits_go_on_anywhere(start: int) -> None:
    """Guards against a resumed run that sees another order."""
    grouping = Grouping(LENGTHS, per_step=4, window=6)
    whole = [n for n, _ in itertools.islice(visits(103, seed=1, start=0, grouping=grouping), 250)]
    later = [n for n, _ in itertools.islice(visits(103, seed=1, start=start, grouping=grouping), 250 - start)]
    assert whole[start:] == later


def test_steps_hold_similar_lengths() -> None:
    """Guards against groups that do not begin where steps do, in later epochs above all: 103 is no multiple of 4."""

    def padding(grouping: Grouping | None) -> float:
        drawn = [n for n, _ in itertools.islice(visits(103, seed=1, start=0, grouping=grouping), 4 * 77)]
        steps = LENGTHS[np.array(drawn).reshape(-1, 4)]
        return float(1 - steps.sum() / (steps.max(axis=1).sum() * 4))

    assert padding(Grouping(LENGTHS, 4, window=12)) < 0.4 * padding(None)


def test_a_step_is_not_sorted_among_steps() -> None:
    """Guards against short sequences first in every window: the losses would swing with the lengths."""
    order = epoch_order(len(LENGTHS), seed=3, epoch=0)
    after = grouped(order, Grouping(LENGTHS, 4, window=25), seed=3, epoch=0)
    longest = LENGTHS[after[:100].reshape(-1, 4)].max(axis=1)
    assert longest.tolist() != sorted(longest.tolist())
