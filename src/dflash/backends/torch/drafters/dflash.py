"""The DFlash drafter (arXiv:2602.06036 §3): each slot's arg max, so q is a point mass (docs/algorithm.md)."""

from __future__ import annotations

from torch import Tensor

from dflash.backends.torch.drafters.block import BlockDrafter, BlockSession
from dflash.types import Proposal


class DFlashDrafter(BlockDrafter):
    """Slots are predicted independently of one another."""

    def session(self) -> DFlashSession:
        """A fresh drafter for one request."""
        return DFlashSession(self)


class DFlashSession(BlockSession):
    """One request's drafter state."""

    def _pick(self, hidden_TH: Tensor, logits_TK: Tensor, anchor: int) -> Proposal:
        return Proposal(tuple(self._shared.tokens(logits_TK.argmax(-1)).tolist()))
