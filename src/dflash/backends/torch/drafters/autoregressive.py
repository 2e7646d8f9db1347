"""A smaller language model as the drafter: it writes a few tokens greedily, one forward each.

What the model has been fed is kept in order by `core/autoregressive.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.backends.torch.drafters.table import candidate_table
from dflash.backends.torch.target import TorchTarget
from dflash.core.autoregressive import AutoregressiveText, DraftingModel
from dflash.types import CandidateTable, Proposal


class AutoregressiveDrafter(DraftingModel[TorchTarget]):
    """Weights side, shared by sessions."""

    def session(self) -> AutoregressiveSession:
        """A fresh drafter for one request."""
        return AutoregressiveSession(self)


class AutoregressiveSession(AutoregressiveText):
    """One request's drafter state; implements `dflash.core.protocols.Drafter`."""

    def __init__(self, shared: AutoregressiveDrafter) -> None:
        session = shared.model.session(exact=False, features=False)
        super().__init__(session, chain=shared.chain, num_ids=shared.num_ids, rewinds=shared.rewinds)

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
        start = self._start(anchor, budget)
        if start is None:
            return None
        rows: list[Tensor] = []
        chain: list[int] = [start.anchor]
        while len(rows) < start.num_tokens:
            if self._rewinds:
                row_V = self._feed([*start.waiting, start.anchor] if not rows else chain[-1:])
            else:
                row_V = self._session.verify(start.anchor, Proposal(tuple(chain[1:]))).logits[-1]
            # A copy: the whole output of a forward need not be kept for it.
            rows.append(row_V[: self._num_ids].clone())
            chain.append(int(rows[-1].argmax()))
        return torch.stack(rows)
