"""The DSpark drafter (arXiv:2607.05147): slots from left to right, each with the Markov head's word on what is before.

Picks are arg maxes, so q is a point mass. The confidence head's product over the slots is the survival of the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from dflash.backends.mlx.draft_model import DraftModel
from dflash.backends.mlx.drafters import transitions
from dflash.backends.mlx.drafters.block import BlockDrafter, BlockSession
from dflash.backends.mlx.target import MLXTarget
from dflash.types import CandidateTable


class DSparkDrafter(BlockDrafter):
    """Backbone of DFlash, then a walk along the slots."""

    def __init__(self, network: DraftModel, target: MLXTarget) -> None:
        super().__init__(network, target)
        self.markov_KR: mx.array | None = None
        """W2 of the scored rows."""
        if network.config.markov_rank:
            weight = network.markov_head.markov_w2.weight
            whole = weight.shape[0] == network.config.vocab_size
            rows = self.token_ids_K if whole else self.rows_K
            self.markov_KR = weight if rows is None else weight[rows]

    def session(self) -> DSparkSession:
        """A fresh drafter for one request."""
        return DSparkSession(self)


class DSparkSession(BlockSession):
    """One request's drafter state."""

    def __init__(self, shared: DSparkDrafter) -> None:
        super().__init__(shared)
        self._dspark = shared

    def _pick(self, hidden_TH: mx.array, logits_TK: mx.array, anchor: int) -> mx.array:
        shared, weight_KR = self._shared, self._dspark.markov_KR
        if weight_KR is None:
            return shared.tokens(mx.argmax(logits_TK, axis=-1))
        markov = shared.network.markov_head
        token, state_R = mx.array(anchor), mx.zeros((markov.rank,), hidden_TH.dtype)
        tokens = []
        for hidden_H, logits_K in zip(hidden_TH, logits_TK, strict=True):
            latent_R, state_R = markov.latent(token, hidden_H, state_R)
            token = shared.tokens(mx.argmax(logits_K + weight_KR @ latent_R))
            tokens.append(token)
        return mx.stack(tokens)

    def _table(self, hidden_TH: mx.array, logits_TK: mx.array, anchor: int, count: int) -> CandidateTable:
        weight_KR, tokens_K = self._dspark.markov_KR, self._shared.token_ids_K
        if weight_KR is None:
            return super()._table(hidden_TH, logits_TK, anchor, count)
        head = self._shared.network.markov_head
        return transitions.markov(head, weight_KR, hidden_TH, logits_TK, tokens_K, anchor, count=count)

    def confidences(self, anchor: int, tokens: Sequence[int]) -> tuple[float, ...]:
        """Probability, for each proposed token, of being accepted if all before it are; () without such a head."""
        network = self._shared.network
        if not network.config.confidence_head:
            return ()
        hidden_TH = self._hidden(anchor)[: len(tokens)]
        before = mx.array([anchor, *tokens[:-1]])
        code_TR = network.markov_head.markov_w1(before) if network.config.markov_rank else None
        logits: mx.array = network.confidence_head(hidden_TH, code_TR)
        found: Any = mx.sigmoid(logits.astype(mx.float32)).tolist()
        return tuple(found)
