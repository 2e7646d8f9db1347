"""The DFlash 2 drafter: of each slot's best candidates, the one that goes best with the token picked before it."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.backends.torch.drafters import transitions
from dflash.backends.torch.drafters.block import BlockDrafter, BlockSession
from dflash.types import CandidateTable, Proposal


class DFlash2Drafter(BlockDrafter):
    """A walk along the slots through the candidate selector's table."""

    def session(self) -> DFlash2Session:
        """A fresh drafter for one request."""
        return DFlash2Session(self)


class DFlash2Session(BlockSession):
    """One request's drafter state."""

    def _pick(self, hidden_TH: Tensor, logits_TK: Tensor, anchor: int) -> Proposal:
        network = self._shared.network
        selector = network.candidate_selector
        if selector is None:  # convolutions only: slots are picked as in v1
            return Proposal(tuple(self._shared.tokens(logits_TK.argmax(-1)).tolist()))
        num_candidates = min(network.config.selector_top_k, logits_TK.shape[1])
        unary_TC, rows_TC = logits_TK.topk(num_candidates, dim=-1)
        candidates_TC = self._shared.tokens(rows_TC)
        scores_TCC = selector(unary_TC, candidates_TC, hidden_TH, torch.tensor([anchor], device=rows_TC.device))
        # Best successor of every candidate at once, on the device; the walk itself is over small integers.
        best_TC = scores_TCC.argmax(-1).tolist()
        picked, tokens = 0, []
        for best_C, candidates_C in zip(best_TC, candidates_TC.tolist(), strict=True):
            picked = best_C[picked]
            tokens.append(candidates_C[picked])
        return Proposal(tuple(tokens))

    def _table(self, hidden_TH: Tensor, logits_TK: Tensor, anchor: int, count: int) -> CandidateTable:
        network, tokens_K = self._shared.network, self._shared.token_ids_K
        if network.candidate_selector is None:
            return super()._table(hidden_TH, logits_TK, anchor, count)
        num_scored = network.config.selector_top_k
        found = transitions.selected(
            network.candidate_selector, hidden_TH, logits_TK, tokens_K, anchor, num_scored=num_scored, count=count
        )
        return found.as_table(tokens_K)
