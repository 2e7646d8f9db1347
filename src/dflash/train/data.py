"""Training sequences: answers in memory, split off the held-out ones, order and batches by (seed, epoch).

The order of an epoch is a pure function of (seed, epoch), so the data position of a checkpoint is two integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash.errors import DataError
from dflash.train.answers import read_answers

_SPLIT_STREAM, _ORDER_STREAM, _ANCHOR_STREAM = 1, 2, 3


@dataclass(frozen=True)
class Sequence_:
    """One prompt with its answer."""

    token_ids: NDArray[np.int64]
    """[S] prompt then answer, cut to the maximum length."""
    num_prompt: int
    loss_mask: NDArray[np.bool_]
    """[S] True on answer tokens that are learnt from."""


@dataclass(frozen=True)
class Dataset:
    """Sequences to learn from and sequences kept apart."""

    train: list[Sequence_]
    held_out: list[Sequence_]


def load_dataset(paths: Sequence[Path], *, max_length: int, held_out: int, limit: int | None, seed: int) -> Dataset:
    """Read answers, shuffle by seed, keep `held_out` apart and at most `limit` of the rest.

    Raises DataError if nothing can be learnt from.
    """
    sequences: list[Sequence_] = []
    for path in paths:
        for row in read_answers(path):
            prompt = list(row.prompt_ids)
            answer_mask = list(row.loss_mask) if row.loss_mask is not None else [True] * len(row.answer_ids)
            ids = np.asarray([*prompt, *row.answer_ids], dtype=np.int64)[:max_length]
            mask = np.asarray([False] * len(prompt) + [bool(m) for m in answer_mask], dtype=np.bool_)[:max_length]
            if (mask[:-1] & mask[1:]).any():
                sequences.append(Sequence_(ids, len(prompt), mask))
    order = np.random.default_rng([seed, _SPLIT_STREAM]).permutation(len(sequences))
    shuffled = [sequences[i] for i in order]
    if len(shuffled) <= held_out:
        raise DataError(
            f"only {len(shuffled)} usable answers in {', '.join(map(str, paths))}, but {held_out} are to be held out; "
            "prepare more answers or lower data.held_out."
        )
    end = None if limit is None else held_out + limit
    return Dataset(train=shuffled[held_out:end], held_out=shuffled[:held_out])


def epoch_order(num_sequences: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which an epoch visits the sequences."""
    return np.random.default_rng([seed, _ORDER_STREAM, epoch]).permutation(num_sequences)


def visits(num_sequences: int, *, seed: int, start: int) -> Iterator[tuple[int, np.random.Generator]]:
    """Endless (sequence number, generator for its anchors), from visit number `start` on."""
    visit = start
    while True:
        epoch, offset = divmod(visit, num_sequences)
        order = epoch_order(num_sequences, seed=seed, epoch=epoch)
        for number in order[offset:]:
            yield int(number), np.random.default_rng([seed, _ANCHOR_STREAM, visit])
            visit += 1
