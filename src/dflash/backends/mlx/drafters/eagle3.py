"""The EAGLE-3 drafter (arXiv:2503.01840): one small forward per token, fed by the target's taps and then by itself.

With n tokens observed, rows 0 to n - 2 (features of a position and the token after it) are kept as keys and values. A
proposal adds the row of the last features and the anchor, then a row per token of the chain, each fed the output of the
one before. Those rows are guesses: the next observation writes true features over them. The chain stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from dflash.backends.mlx.drafters.table import best_rows, on_host
from dflash.backends.mlx.eagle3_model import Eagle3Model
from dflash.backends.mlx.states.base import Span
from dflash.backends.mlx.states.keyvalue import KeyValueState
from dflash.backends.mlx.target import MLXTarget
from dflash.backends.mlx.tokens import DeviceTokens
from dflash.types import CandidateTable, Proposal


class Eagle3Drafter:
    """Weights side, shared by sessions."""

    def __init__(self, network: Eagle3Model, target: MLXTarget) -> None:
        """
        Args:
            network: the draft.
            target: lends embedding and head where the draft has none.
        """
        self.network = network
        self.target = target
        self.dtype: mx.Dtype = network.fc.weight.dtype
        self.token_ids_K: mx.array | None = None
        """Target id of each scored row; None = row j is id j."""
        if network.vocabulary is not None:
            self.token_ids_K = mx.array(network.vocabulary)

    def session(self) -> Eagle3Session:
        """A fresh drafter for one request."""
        return Eagle3Session(self)

    def tokens(self, rows: mx.array) -> mx.array:
        """Target ids of scored rows."""
        return rows if self.token_ids_K is None else self.token_ids_K[rows]

    def embed(self, ids: mx.array) -> mx.array:
        """Raw embedding rows [..., H] of target ids, in the draft's dtype."""
        own = self.network.config.owns_embedding
        return (self.network.embed_tokens(ids) if own else self.target.embed_tokens(ids)).astype(self.dtype)

    def logits(self, normed_RH: mx.array) -> mx.array:
        """Logits [R, K] of the scored rows, float32."""
        owns = self.network.config.owns_head
        logits = self.network.lm_head(normed_RH) if owns else self.target.head(normed_RH)
        return logits.astype(mx.float32)


class Eagle3Session:
    """One request's drafter state; implements `dflash.core.protocols.Drafter`."""

    def __init__(self, shared: Eagle3Drafter) -> None:
        self._shared = shared
        self._span = Span()  # starts behind the rows with true features, and within a chain behind its rows
        self._states = [KeyValueState(self._span) for _ in shared.network.layers]
        self._last_1H: mx.array | None = None  # fused features of the newest token, whose successor is not known yet
        self._limit: int | None = None

    @property
    def max_proposal(self) -> int:
        """Most tokens of a chain."""
        return self._shared.network.config.max_proposal

    def limit_context(self, num_rows: int) -> None:
        """Let the chain see the newest `num_rows` committed rows only: a step then costs the same at any length of the
        text."""
        self._limit = num_rows

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        """Keep a row for each newly committed token whose predecessor's features [.., taps x width] are known."""
        assert features is not None
        assert features.shape[0] == len(token_ids)
        shared, tokens = self._shared, list(token_ids)
        fused_RH = shared.network.fuse(features.astype(shared.dtype))
        if self._last_1H is None:
            before_RH, tokens = fused_RH[:-1], tokens[1:]
        else:
            before_RH = mx.concatenate([self._last_1H, fused_RH[:-1]])
        self._last_1H = fused_RH[-1:]
        if tokens:
            self._span.num_rows = len(tokens)
            shared.network.extend(shared.embed(mx.array(tokens)), before_RH, self._states)
            self._span.start += len(tokens)
        mx.async_eval([self._last_1H, *(one for state in self._states for one in state.arrays())])

    def propose(self, anchor: int, budget: int) -> Proposal:
        """The draft's own greedy continuation, at most `budget` tokens; not waited for."""
        chain = self._chain(anchor, min(budget, self.max_proposal), 1)
        tokens = mx.concatenate([self._shared.tokens(rows_C) for rows_C, _ in chain])
        mx.async_eval(tokens)
        return Proposal(DeviceTokens(tokens))

    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        """The `count` best candidates of each slot of that continuation, and how likely each is after each candidate of
        the slot before: a step feeds all of them at once, on top of the greedy chain before them. Waits for the
        device: how much is fed depends on them."""
        rows, chances, tables = [], [], []
        for rows_C, logits_CK in self._chain(anchor, min(budget, self.max_proposal), count):
            after_CK = logits_CK - mx.logsumexp(logits_CK, axis=-1, keepdims=True)
            rows.append(rows_C)
            chances.append(after_CK[0][rows_C])
            tables.append(after_CK[:, rows_C])
        if len(rows) > 1:
            return on_host(mx.stack(rows), self._shared.token_ids_K, mx.stack(chances), mx.stack(tables[1:]))
        found = on_host(mx.stack(rows), self._shared.token_ids_K, mx.stack(chances))
        return CandidateTable(found.ids, found.log_probs, [])

    def scores(self, anchor: int) -> tuple[NDArray[np.float32], NDArray[np.int64] | None]:
        """Logits [T, K] of the slots of the greedy chain, and the target ids [K] they belong to (None = 0..V-1)."""
        chain = self._chain(anchor, self.max_proposal, 1)
        ids = self._shared.token_ids_K
        logits_TK = np.array(mx.concatenate([logits_CK for _, logits_CK in chain]))
        return logits_TK, None if ids is None else np.array(ids.astype(mx.int64))

    def _chain(self, anchor: int, num_slots: int, count: int) -> list[tuple[mx.array, mx.array]]:
        """Of `num_slots` slots the rows [C] of their candidates and the logits [C before, K] after each of the slot
        before; the first candidates are the chain."""
        shared, network, span = self._shared, self._shared.network, self._span
        assert self._last_1H is not None, "propose needs a prompt"
        num_true, hidden_1H = span.start, self._last_1H
        first = 0 if self._limit is None else max(0, num_true - self._limit)
        tokens_C = mx.array([anchor])
        found = []
        for _ in range(num_slots):
            span.num_rows = len(tokens_C)
            hidden_CH = mx.broadcast_to(hidden_1H, (len(tokens_C), hidden_1H.shape[1]))
            out_CH = network.step(shared.embed(tokens_C), hidden_CH, self._states, first)
            normed_CH = network.norm(out_CH)
            logits_CK = shared.logits(normed_CH)
            rows_C = best_rows(logits_CK[0], count)
            found.append((rows_C, logits_CK))
            tokens_C = shared.tokens(rows_C)
            hidden_1H = (normed_CH if network.config.feeds_normed else out_CH)[:1]
            span.start += 1
        span.start = num_true
        return found
