"""Anchors and labels: absolute positions, eligibility, and that every visit draws anew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dflash.train.anchors import Blocks, draw_blocks, slot_weights


def draw(mask: list[int], block_size: int = 4, num_anchors: int = 100, seed: int = 0) -> Blocks:
    """Blocks of a sequence whose token at position p is p."""
    rng = np.random.default_rng(seed)
    ids = np.arange(len(mask), dtype=np.int64)
    return draw_blocks(ids, np.array(mask, dtype=np.bool_), block_size=block_size, num_anchors=num_anchors, rng=rng)


def test_labels_are_absolute_positions() -> None:
    """Guards against a label shift: tokens are their positions, so the label of slot i must be anchor + i."""
    blocks = draw([0] * 10 + [1] * 30, block_size=7, num_anchors=12)
    expected = blocks.anchors_A[:, None] + np.arange(1, 7)
    assert len(blocks.anchors_A) == 12
    np.testing.assert_array_equal(blocks.labels_AT[blocks.supervised_AT], expected[blocks.supervised_AT])
    np.testing.assert_array_equal(blocks.supervised_AT, expected < 40)
    assert blocks.supervised_AT[:, 0].all(), "slot 1 of every anchor has a label"


@given(
    mask=st.lists(st.integers(0, 1), min_size=1, max_size=24),
    block_size=st.integers(2, 9),
    num_anchors=st.integers(1, 12),
    seed=st.integers(0, 5),
)
def test_brute_force(mask: list[int], block_size: int, num_anchors: int, seed: int) -> None:
    """Guards against every mistake of vectorised indexing (ends, holes in the mask, short tails)."""
    blocks = draw(mask, block_size, num_anchors, seed)
    eligible = [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
    anchors = blocks.anchors_A.tolist()
    assert set(anchors) <= set(eligible)
    assert len(anchors) == min(num_anchors, len(eligible))
    assert anchors == sorted(set(anchors))
    for j, anchor in enumerate(anchors):
        for i in range(1, block_size):
            supervised = anchor + i < len(mask) and mask[anchor + i] == 1
            assert blocks.supervised_AT[j, i - 1] == supervised
            assert blocks.labels_AT[j, i - 1] == (anchor + i if supervised else 0)


@pytest.mark.parametrize("mask", [[1], [0, 0, 0], [1, 0, 1, 0], [0, 0, 1]])
def test_nothing_to_learn_gives_no_blocks(mask: list[int]) -> None:
    """Guards against anchors in the prompt, or a crash for answers of one token."""
    blocks = draw(mask)
    assert blocks.anchors_A.shape == (0,)
    assert blocks.labels_AT.shape == blocks.supervised_AT.shape == (0, 3)


def test_the_last_prompt_token_is_no_anchor() -> None:
    """Guards against an anchor that decoding never has: the first anchor is the answer's first token."""
    assert draw([0, 0, 1, 1, 1]).anchors_A.tolist() == [2, 3]


def test_every_visit_draws_anew() -> None:
    """Guards against anchors that stay the same in every epoch (paper: 4.94 against 5.64), and against draws that a
    resumed run could not repeat."""
    drawn = [draw([1] * 200, num_anchors=8, seed=seed).anchors_A.tolist() for seed in range(20)]
    assert len({tuple(anchors) for anchors in drawn}) == 20
    assert drawn[3] == draw([1] * 200, num_anchors=8, seed=3).anchors_A.tolist()


def test_anchors_cover_the_answer_evenly() -> None:
    """Guards against a biased draw: each of 20 positions is chosen in about a quarter of 2000 draws (5 sigma)."""
    counts: NDArray[np.int64] = np.zeros(21, dtype=np.int64)
    for seed in range(2000):
        counts[draw([1] * 21, num_anchors=5, seed=seed).anchors_A] += 1
    assert counts[20] == 0
    assert abs(counts[:20] - 500).max() < 5 * (2000 * 0.25 * 0.75) ** 0.5


def test_slot_weights() -> None:
    """Guards against another decay, or one that starts at slot 0: exp(-(i - 1) / gamma), so slot 1 weighs 1."""
    np.testing.assert_allclose(slot_weights(5, 4.0), np.exp([0, -0.25, -0.5, -0.75]), rtol=1e-6)
    assert slot_weights(16, 7.0).shape == (15,)
