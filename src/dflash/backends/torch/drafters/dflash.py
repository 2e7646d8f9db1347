"""The DFlash drafter (arXiv:2602.06036 §3): each slot's arg max, so q is a point mass (docs/algorithm.md)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
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

    @torch.inference_mode()
    def scores(self, anchor: int) -> tuple[NDArray[np.float32], NDArray[np.int64] | None]:
        """Logits [T, K] of the block's predicting slots, and the target ids [K] they belong to (None = 0..V-1)."""
        logits_TK = self._logits(self._hidden(anchor)).float().cpu().numpy()
        ids = self._shared.token_ids_K
        return logits_TK, None if ids is None else ids.cpu().numpy()

    def _pick(self, hidden_TH: Tensor, logits_TK: Tensor, anchor: int) -> Proposal:
        return Proposal(tuple(self._shared.tokens(logits_TK.argmax(-1)).tolist()))
