"""A smaller language model of mlx-lm as the drafter: it writes a few tokens greedily, one forward each.

What the model has been fed is kept in order by `core/autoregressive.py`. A chain stays on the device: each forward
takes the token of the one before it as an array, and the host reads all of them at once.
"""

from __future__ import annotations

import mlx.core as mx

from dflash.backends.mlx.drafters.table import candidate_table
from dflash.backends.mlx.target import MLXTarget, MLXTargetSession
from dflash.backends.mlx.tokens import DeviceTokens
from dflash.core.autoregressive import AutoregressiveText, ChainStart, DraftingModel
from dflash.types import CandidateTable, Proposal


class AutoregressiveDrafter(DraftingModel[MLXTarget]):
    """Weights side, shared by sessions."""

    def session(self) -> AutoregressiveSession:
        """A fresh drafter for one request."""
        return AutoregressiveSession(self)


class AutoregressiveSession(AutoregressiveText):
    """One request's drafter state; implements `dflash.core.protocols.Drafter`."""

    _session: MLXTargetSession

    def __init__(self, shared: AutoregressiveDrafter) -> None:
        session = shared.model.session(exact=False, features=False)
        super().__init__(session, chain=shared.chain, num_ids=shared.num_ids, rewinds=shared.rewinds)
        self._unread: DeviceTokens | None = None  # fed behind `_fed`, and not looked at yet

    def propose(self, anchor: int, budget: int) -> Proposal:
        """The draft model's own greedy continuation, at most `budget` tokens; not waited for."""
        rows = self._chain_logits(anchor, budget)
        return Proposal() if rows is None else Proposal(DeviceTokens(mx.argmax(rows, axis=-1)))

    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        """The `count` best candidates of each slot of that continuation: what is likely after other tokens than the
        greedy ones would take forwards of its own, so the greedy chain's rows stand for all."""
        rows = self._chain_logits(anchor, budget)
        return CandidateTable((), ()) if rows is None else candidate_table(rows, None, count)

    def _chain_logits(self, anchor: int, budget: int) -> mx.array | None:
        """Logits [T, V] of the slots of the greedy chain; None at the end of the draft model's context."""
        start = self._start(anchor, budget)
        if start is None:
            return None
        rows = self._kept_chain(start) if self._rewinds else self._fed_again(start)
        return mx.stack(rows)

    def _kept_chain(self, start: ChainStart) -> list[mx.array]:
        """Rows of a chain whose tokens, but the last, stay fed."""
        ids, rows, chain = mx.array([*start.waiting, start.anchor]), [], []
        while True:
            rows.append(self._session.extend(ids)[: self._num_ids])
            ids = mx.argmax(rows[-1], axis=-1, keepdims=True)
            mx.async_eval(ids)  # the device begins while the host writes the next forward's graph
            if len(rows) == start.num_tokens:
                break
            chain.append(ids)
        self._fed += [*start.waiting, start.anchor]
        self._unread = DeviceTokens(mx.concatenate(chain)) if chain else None
        return rows

    def _fed_again(self, start: ChainStart) -> list[mx.array]:
        """The same where layers cannot go back."""
        rows: list[mx.array] = []
        chain: list[mx.array] = []
        while len(rows) < start.num_tokens:
            tokens = DeviceTokens(mx.concatenate(chain)) if chain else ()
            rows.append(self._session.verify(start.anchor, Proposal(tokens)).logits[-1, : self._num_ids])
            chain.append(mx.argmax(rows[-1], axis=-1, keepdims=True))
        return rows

    def _cut(self) -> None:
        if self._unread is not None:  # computed long ago: the target has verified them
            self._fed += self._unread
            self._unread = None
        super()._cut()
