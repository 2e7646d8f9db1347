"""The DFlash drafter (arXiv:2602.06036 §3): each slot's arg max, so q is a point mass (docs/algorithm.md)."""

from __future__ import annotations

import mlx.core as mx

from dflash.backends.mlx.drafters.block import BlockDrafter, BlockSession


class DFlashDrafter(BlockDrafter):
    """Slots are predicted independently of one another."""

    def session(self) -> DFlashSession:
        """A fresh drafter for one request."""
        return DFlashSession(self)


class DFlashSession(BlockSession):
    """One request's drafter state."""

    def _pick(self, hidden_TH: mx.array, logits_TK: mx.array, anchor: int) -> mx.array:
        return self._shared.tokens(mx.argmax(logits_TK, axis=-1))
