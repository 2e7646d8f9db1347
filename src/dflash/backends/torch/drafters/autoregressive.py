"""A smaller language model as the drafter: it writes a few tokens greedily, one forward each.

Any model that may be a target may draft (arXiv:2211.17192, arXiv:2302.01318): its session is that of a target, without
taps. The model has always been fed the committed tokens, or a text that begins with them: where every layer can go
back (`SessionCache.rewinds`), the rows of a chain are kept and those that were rejected are cut off; where a layer
cannot, each step feeds the chain again without committing it, which is the slow reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash.backends.torch.drafters.table import candidate_table
from dflash.backends.torch.target import TorchTarget, TorchTargetSession
from dflash.types import CandidateTable, Proposal

CHAIN = 7
"""Tokens of a chain: with the anchor a forward of eight rows. Each costs a forward of the draft model."""
_WAITING = 16
"""Committed tokens that may wait for the next proposal, whose first forward then takes them along."""


class AutoregressiveDrafter:
    """Weights side, shared by sessions."""

    def __init__(self, model: TorchTarget, target: TorchTarget, *, chain: int = CHAIN, rewinds: bool = True) -> None:
        """
        Args:
            model: the draft model, without taps, on the target's device.
            target: whose ids are proposed; the models' embeddings may differ in padding.
            chain: most tokens of a proposal.
            rewinds: keep a chain's rows where the layers can go back; without it they are fed again (the reference).
        """
        self.model = model
        self.chain = chain
        self.rewinds = rewinds
        self.num_ids = min(model.vocab_size, target.vocab_size)
        """Ids that both models have; the others are padding."""

    def session(self) -> AutoregressiveSession:
        """A fresh drafter for one request."""
        return AutoregressiveSession(self)


class AutoregressiveSession:
    """One request's drafter state; implements `dflash.core.protocols.Drafter`."""

    def __init__(self, shared: AutoregressiveDrafter) -> None:
        self._shared = shared
        self._session: TorchTargetSession = shared.model.session(exact=False, features=False)
        self._rewinds = shared.rewinds and self._session.rewinds
        self._text: list[int] = []  # committed tokens
        self._fed: list[int] = []  # what the model has been fed: the text so far, then a chain where layers go back
        self._known = 0  # so many of the latter are known to agree with the former

    @property
    def max_proposal(self) -> int:
        """Most tokens of a chain."""
        return self._shared.chain

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        """Learn newly committed tokens; `features` are not used."""
        # An id that only the target has is padding of its embedding; any other in its place spoils guesses at most.
        self._text += [min(token, self._shared.num_ids - 1) for token in token_ids]
        self._cut()
        if len(self._text) - len(self._fed) > _WAITING and len(self._text) < self._session.max_length:
            self._feed(self._text[len(self._fed) :])

    def propose(self, anchor: int, budget: int) -> Proposal:
        """The draft model's own greedy continuation, at most `budget` tokens."""
        logits_TV = self._chain_logits(anchor, budget)
        if logits_TV is None:
            return Proposal()
        best = logits_TV.float().log_softmax(-1).max(-1)
        return Proposal(tuple(best.indices.tolist()), log_probs=tuple(best.values.tolist()))

    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        """The `count` best candidates of each slot of that continuation: what is likely after other tokens than the
        greedy ones would take forwards of its own, so the greedy chain's rows stand for all."""
        logits_TV = self._chain_logits(anchor, budget)
        return CandidateTable((), ()) if logits_TV is None else candidate_table(logits_TV, None, count)

    @torch.inference_mode()
    def _chain_logits(self, anchor: int, budget: int) -> Tensor | None:
        """Logits [T, V] of the slots of the greedy chain; None at the end of the draft model's context."""
        num_tokens = min(budget, self.max_proposal, self._session.max_length - len(self._text) - 1)
        if num_tokens < 1:
            return None
        self._cut()
        waiting = self._text[len(self._fed) :]
        anchor = min(anchor, self._shared.num_ids - 1)
        if not self._rewinds and waiting:
            self._feed(waiting)
        rows: list[Tensor] = []
        chain: list[int] = [anchor]
        while len(rows) < num_tokens:
            if self._rewinds:
                row_V = self._feed([*waiting, anchor] if not rows else chain[-1:])
            else:
                row_V = self._session.verify(anchor, Proposal(tuple(chain[1:]))).logits[-1]
            # A copy: the whole output of a forward need not be kept for it.
            rows.append(row_V[: self._shared.num_ids].clone())
            chain.append(int(rows[-1].argmax()))
        return torch.stack(rows)

    def _feed(self, token_ids: Sequence[int]) -> Tensor:
        """Feed and commit tokens; logits [V] of the last one."""
        logits: Tensor = self._session.prefill(token_ids).logits
        self._fed += token_ids
        return logits[-1]

    def _cut(self) -> None:
        """Forget what was fed beyond the committed text or differs from it."""
        kept = self._known
        while kept < min(len(self._fed), len(self._text)) and self._fed[kept] == self._text[kept]:
            kept += 1
        if kept < len(self._fed):
            self._session.rewind(kept)
            del self._fed[kept:]
        self._known = kept
