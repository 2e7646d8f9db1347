"""Where training blocks start, and what their slots must say (docs/training.md).

An anchor is an answer token whose successor is an answer token too, exactly the situation at decode time: the
anchor is known, its feature is not. Anchors are drawn without replacement, anew for every visit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Blocks:
    """The training blocks of one sequence."""

    anchors_A: NDArray[np.int64]
    """Absolute positions, increasing."""
    labels_AT: NDArray[np.int64]
    """[A, B - 1] token at anchor + i for i = 1..B-1; 0 where unsupervised."""
    supervised_AT: NDArray[np.bool_]
    """[A, B - 1] position inside the sequence and part of the answer."""


def draw_blocks(
    token_ids: NDArray[np.int64],
    loss_mask: NDArray[np.bool_],
    *,
    block_size: int,
    num_anchors: int,
    rng: np.random.Generator,
) -> Blocks:
    """Draw up to `num_anchors` anchors of one sequence. token_ids, loss_mask: [S]; may return zero blocks."""
    eligible = np.flatnonzero(loss_mask[:-1] & loss_mask[1:])
    if len(eligible) > num_anchors:
        eligible = np.sort(rng.choice(eligible, size=num_anchors, replace=False))
    positions_AT = eligible[:, None] + np.arange(1, block_size)
    inside = positions_AT < len(token_ids)
    safe = np.where(inside, positions_AT, 0)
    supervised = inside & loss_mask[safe]
    labels = np.where(supervised, token_ids[safe], 0)
    return Blocks(eligible.astype(np.int64), labels.astype(np.int64), supervised)


def slot_weights(block_size: int, gamma: float) -> NDArray[np.float32]:
    """[B - 1] weights exp(-(i - 1) / gamma) of slots i = 1..B-1 (arXiv:2602.06036)."""
    return np.exp(-np.arange(block_size - 1) / gamma).astype(np.float32)
