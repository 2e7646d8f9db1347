"""The DFlash drafter (arXiv:2602.06036 §3): each slot's arg max, so q is a point mass (docs/algorithm.md)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from dflash.backends.mlx.drafters.block import BlockDrafter, BlockSession


class DFlashDrafter(BlockDrafter):
    """Slots are predicted independently of one another."""

    def session(self) -> DFlashSession:
        """A fresh drafter for one request."""
        return DFlashSession(self)


class DFlashSession(BlockSession):
    """One request's drafter state."""

    def scores(self, anchor: int) -> tuple[NDArray[np.float32], NDArray[np.int64] | None]:
        """Logits [T, K] of the block's predicting slots, and the target ids [K] they belong to (None = 0..V-1)."""
        logits_TK = np.array(self._shared.logits(self._hidden(anchor)).astype(mx.float32))
        ids = self._shared.token_ids_K
        return logits_TK, None if ids is None else np.array(ids.astype(mx.int64))

    def _pick(self, hidden_TH: mx.array, logits_TK: mx.array, anchor: int) -> mx.array:
        return self._shared.tokens(mx.argmax(logits_TK, axis=-1))
