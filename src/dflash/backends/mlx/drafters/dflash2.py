"""The DFlash 2 drafter: of each slot's best candidates, the one that goes best with the token picked before it."""

from __future__ import annotations

import mlx.core as mx

from dflash.backends.mlx.drafters import transitions
from dflash.backends.mlx.drafters.block import BlockDrafter, BlockSession
from dflash.types import CandidateTable


class DFlash2Drafter(BlockDrafter):
    """A walk along the slots through the candidate selector's table."""

    def session(self) -> DFlash2Session:
        """A fresh drafter for one request."""
        return DFlash2Session(self)


class DFlash2Session(BlockSession):
    """One request's drafter state."""

    def _pick(self, hidden_TH: mx.array, logits_TK: mx.array, anchor: int) -> mx.array:
        shared, config = self._shared, self._shared.network.config
        if not config.selector_rank:  # convolutions only: slots are picked as in v1
            return shared.tokens(mx.argmax(logits_TK, axis=-1))
        num_candidates = min(config.selector_top_k, logits_TK.shape[1])
        rows_TC = mx.argpartition(-logits_TK, kth=num_candidates - 1, axis=-1)[:, :num_candidates]
        candidates_TC = shared.tokens(rows_TC)
        unary_TC = mx.take_along_axis(logits_TK, rows_TC, axis=-1)
        best_TC = mx.argmax(shared.network.candidate_selector(unary_TC, candidates_TC, hidden_TH, anchor), axis=-1)
        # A walk over single numbers, but on the device: reading them would be a second wait per round.
        picked, tokens = mx.array(0), []
        for best_C, candidates_C in zip(best_TC, candidates_TC, strict=True):
            picked = best_C[picked]
            tokens.append(candidates_C[picked])
        return mx.stack(tokens)

    def _table(self, hidden_TH: mx.array, logits_TK: mx.array, anchor: int, count: int) -> CandidateTable:
        shared, config = self._shared, self._shared.network.config
        if not config.selector_rank:
            return super()._table(hidden_TH, logits_TK, anchor, count)
        selector, num_scored = shared.network.candidate_selector, config.selector_top_k
        return transitions.selected(
            selector, hidden_TH, logits_TK, shared.token_ids_K, anchor, num_scored=num_scored, count=count
        )
