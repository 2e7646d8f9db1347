"""What all drafters of one block share: states with the context, the forward of a block, logits of its slots.

Context rows are projected once per committed token and kept; the block's own rows are overwritten by the next block.
How slots become tokens is the drafter's own: a subclass of `BlockSession` with one method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from dflash.backends.mlx.draft_attention import window_of
from dflash.backends.mlx.draft_model import DraftModel
from dflash.backends.mlx.drafters.table import candidate_table
from dflash.backends.mlx.states.base import Span
from dflash.backends.mlx.states.keyvalue import KeyValueState
from dflash.backends.mlx.target import MLXTarget
from dflash.backends.mlx.tokens import DeviceTokens
from dflash.types import CandidateTable, Proposal


class BlockDrafter:
    """Weights side, shared by sessions: the network, the embedding its block is made of and the head it scores with."""

    def __init__(self, network: DraftModel, target: MLXTarget) -> None:
        """
        Args:
            network: the draft.
            target: lends embedding and head where the draft has none (of the head, the rows of the draft's vocabulary).
        """
        config = network.config
        self.network = network
        self.target = target
        self.dtype: mx.Dtype = network.fc.weight.dtype
        self.token_ids_K: mx.array | None = None
        """Target id of each scored row; None = row j is id j."""
        self.rows_K: mx.array | None = None
        """Rows of the draft's own tables over its vocabulary (head, W2) that are scored; None = all."""
        self.head_KH: mx.array | None = None
        """Scored rows of the head; None = the whole head of its owner, in whatever form that has it."""
        if network.vocabulary is not None:
            # The mask id must never be proposed; here it simply is no candidate.
            kept = [row for row, token in enumerate(network.vocabulary) if token != config.mask_token_id]
            self.rows_K = mx.array(kept)
            self.token_ids_K = mx.array(network.vocabulary)[self.rows_K]
            if not config.owns_head:
                self.head_KH = target.head_rows(self.token_ids_K).astype(self.dtype)
            else:
                weight = network.lm_head.weight
                whole = weight.shape[0] == config.vocab_size
                self.head_KH = weight[self.token_ids_K if whole else self.rows_K]
            mx.eval(self.head_KH)

    def session(self) -> BlockSession:
        """A fresh drafter for one request."""
        raise NotImplementedError

    def tokens(self, rows: mx.array) -> mx.array:
        """Target ids of scored rows."""
        return rows if self.token_ids_K is None else self.token_ids_K[rows]

    def embed(self, ids: mx.array) -> mx.array:
        """Raw embedding rows [..., H] of target ids, in the draft's dtype."""
        own = self.network.config.owns_embedding
        return (self.network.embed_tokens(ids) if own else self.target.embed_tokens(ids)).astype(self.dtype)

    def logits(self, hidden_TH: mx.array) -> mx.array:
        """Logits [T, K] of the scored rows; the mask id is never the largest."""
        config = self.network.config
        if self.head_KH is not None:
            logits = hidden_TH @ self.head_KH.T
        else:
            logits = self.network.lm_head(hidden_TH) if config.owns_head else self.target.head(hidden_TH)
        logits = self.network.finish_logits(logits)
        if self.token_ids_K is None:
            logits[:, config.mask_token_id] = -mx.inf
        return logits


class BlockSession:
    """One request's drafter state; implements `dflash.core.protocols.Drafter`. Nothing waits for the device here: the
    proposal's tokens are read when the acceptor reads the target's."""

    def __init__(self, shared: BlockDrafter) -> None:
        self._shared = shared
        config = shared.network.config
        self._span = Span()
        self._states = [
            KeyValueState(self._span, window_of(config, number)) for number in range(config.num_hidden_layers)
        ]

    def limit_context(self, num_rows: int) -> None:
        """Let layers with full attention see the newest `num_rows` context rows only, and keep no others: a block then
        costs the same at any length of the text. Layers with a window of their own keep it. Before the first token."""
        assert not self._span.start, "rows that were left out cannot come back"
        for state in self._states:
            if state.window is None:
                state.window = num_rows + 1  # counted with the anchor's slot

    @property
    def max_proposal(self) -> int:
        """Most tokens one block proposes."""
        return self._shared.network.config.max_proposal

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        """Project the features [len(token_ids), taps x hidden] of newly committed tokens and keep the result."""
        assert features is not None
        assert features.shape[0] == len(token_ids)
        self._span.num_rows = len(token_ids)
        self._shared.network.write_context(features.astype(self._shared.dtype), self._states)
        self._span.start += len(token_ids)
        mx.async_eval([one for state in self._states for one in state.arrays()])

    def propose(self, anchor: int, budget: int) -> Proposal:
        """Tokens of the first `budget` predicting slots. The block runs at full width, as the draft was trained."""
        hidden_TH = self._hidden(anchor)[: min(budget, self.max_proposal)]
        tokens = self._pick(hidden_TH, self._shared.logits(hidden_TH), anchor)
        mx.async_eval(tokens)
        return Proposal(DeviceTokens(tokens))

    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        """The `count` best candidates of each of the first `budget` predicting slots, for chains and trees. Waits for
        the device: how much is fed depends on them."""
        hidden_TH = self._hidden(anchor)[: min(budget, self.max_proposal)]
        return self._table(hidden_TH, self._shared.logits(hidden_TH), anchor, count)

    def _table(self, hidden_TH: mx.array, logits_TK: mx.array, anchor: int, count: int) -> CandidateTable:
        """Turn them into candidates; here of slots that do not depend on one another."""
        return candidate_table(logits_TK, self._shared.token_ids_K, count)

    def _pick(self, hidden_TH: mx.array, logits_TK: mx.array, anchor: int) -> mx.array:
        """Turn the states and logits of the predicting slots into tokens [T]."""
        raise NotImplementedError

    def _hidden(self, anchor: int) -> mx.array:
        """Final states [T, H] of the slots that predict, for the block behind the context."""
        shared, config = self._shared, self._shared.network.config
        ids = mx.array([anchor] + [config.mask_token_id] * (config.block_size - 1))
        self._span.num_rows = config.block_size
        hidden_BH = shared.network(shared.embed(ids), self._states)
        return hidden_BH if config.anchor_predicts else hidden_BH[1:]
