"""The DSpark drafter (arXiv:2607.05147): slots from left to right, each with the Markov head's word on what is before.

Picks are arg maxes, so q is a point mass. The confidence head's product over the slots is the survival of the chain.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.drafters import transitions
from dflash.backends.torch.drafters.block import BlockDrafter, BlockSession
from dflash.backends.torch.target import TorchTarget
from dflash.types import CandidateTable, Proposal


class DSparkDrafter(BlockDrafter):
    """Backbone of DFlash, then a walk along the slots."""

    def __init__(self, network: DraftModel, target: TorchTarget) -> None:
        super().__init__(network, target)
        markov = network.markov_head
        self.markov_KR: Tensor | None = None
        """W2 of the scored rows."""
        if markov is not None:
            weight = markov.markov_w2.weight
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

    def _pick(self, hidden_TH: Tensor, logits_TK: Tensor, anchor: int) -> Proposal:
        markov, weight_KR = self._shared.network.markov_head, self._dspark.markov_KR
        if markov is None or weight_KR is None:
            return Proposal(tuple(self._shared.tokens(logits_TK.argmax(-1)).tolist()))
        token = torch.tensor(anchor, device=hidden_TH.device)
        state = markov.start(hidden_TH[0])
        tokens = []
        for hidden_H, logits_K in zip(hidden_TH, logits_TK, strict=True):
            latent, state = markov.latent(token, hidden_H, state)
            # Stays on the device: one transfer per block, at its end.
            token = self._shared.tokens((logits_K + weight_KR @ latent).argmax())
            tokens.append(token)
        return Proposal(tuple(torch.stack(tokens).tolist()))

    def _table(self, hidden_TH: Tensor, logits_TK: Tensor, anchor: int, count: int) -> CandidateTable:
        markov, weight_KR = self._shared.network.markov_head, self._dspark.markov_KR
        tokens_K = self._shared.token_ids_K
        if markov is None or weight_KR is None:
            return super()._table(hidden_TH, logits_TK, anchor, count)
        found = transitions.markov(markov, weight_KR, hidden_TH, logits_TK, tokens_K, anchor, count=count)
        return found.as_table(tokens_K)

    @torch.inference_mode()
    def confidences(self, anchor: int, tokens: Sequence[int]) -> tuple[float, ...]:
        """Probability, for each proposed token, of being accepted if all before it are; () without a confidence head.

        They depend on a slot's own token no more than acceptance does: slot k reads tokens before k only.
        """
        network = self._shared.network
        if network.confidence_head is None:
            return ()
        hidden_TH = self._hidden(anchor)[: len(tokens)]
        return tuple(self._confidence_logits(hidden_TH, anchor, tokens).sigmoid().tolist())

    def _confidence_logits(self, hidden_TH: Tensor, anchor: int, tokens: Sequence[int]) -> Tensor:
        network = self._shared.network
        assert network.confidence_head is not None
        before = torch.tensor((anchor, *tokens[:-1]), device=hidden_TH.device)
        code_TR = None if network.markov_head is None else network.markov_head.markov_w1(before)
        logits: Tensor = network.confidence_head(hidden_TH, code_TR)
        return logits.float()
