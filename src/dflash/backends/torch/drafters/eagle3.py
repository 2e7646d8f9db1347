"""The EAGLE-3 drafter (arXiv:2503.01840): one small forward per token, fed by the target's taps and then by itself.

With n tokens observed, rows 0 to n - 2 (features of a position and the token after it) are kept as keys and values. A
proposal adds the row of the last features and the anchor, then a row per token of the chain, each fed the output of the
one before. Those rows are guesses: the next observation writes true features over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash.backends.torch.drafters.block import own_or_target, scorer
from dflash.backends.torch.drafters.transitions import Transitions
from dflash.backends.torch.eagle3_model import Eagle3Model, KeptRows
from dflash.backends.torch.target import TorchTarget
from dflash.types import CandidateTable, Proposal

_BUCKET = 512
"""Rows by which the kept keys and values grow."""


class Eagle3Drafter:
    """Weights side, shared by sessions."""

    def __init__(self, network: Eagle3Model, target: TorchTarget) -> None:
        """
        Args:
            network: the draft, on the target's device.
            target: lends embedding and head where the draft has none.
        """
        self.network = network
        dtype = network.fc.weight.dtype
        self.embed_VH = own_or_target(network.embed_tokens, target.embed_weight).to(dtype)
        self.head_KH = own_or_target(network.lm_head, target.head_weight).to(device=target.device, dtype=dtype)
        self.score = scorer(self.head_KH, target)
        self.token_ids_K: Tensor | None = None
        """Target id of each scored row; None = row j is id j."""
        if network.vocabulary is not None:
            self.token_ids_K = torch.tensor(network.vocabulary, device=target.device)

    def session(self) -> Eagle3Session:
        """A fresh drafter for one request."""
        return Eagle3Session(self)


class Eagle3Session:
    """One request's drafter state; implements `dflash.core.protocols.Drafter`."""

    def __init__(self, shared: Eagle3Drafter) -> None:
        self._shared = shared
        self._kept: list[KeptRows] = []
        self._num_rows = 0  # rows with true features
        self._last_1H: Tensor | None = None  # fused features of the newest token, whose successor is not known yet
        self._limit: int | None = None

    @property
    def max_proposal(self) -> int:
        """Most tokens of a chain."""
        return self._shared.network.config.max_proposal

    def limit_context(self, num_rows: int) -> None:
        """Let the chain see the newest `num_rows` committed rows only: a step then costs the same at any length of the
        text."""
        self._limit = num_rows

    @torch.inference_mode()
    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        """Keep a row for each newly committed token whose predecessor's features [.., taps x width] are known."""
        assert features is not None
        assert features.shape[0] == len(token_ids)
        network = self._shared.network
        fused_RH = network.fuse(features.to(network.fc.weight.dtype))
        tokens = list(token_ids)
        if self._last_1H is None:
            before_RH, tokens = fused_RH[:-1], tokens[1:]
        else:
            before_RH = torch.cat([self._last_1H, fused_RH[:-1]])
        self._last_1H = fused_RH[-1:].clone()
        if tokens:
            self._reserve(self._num_rows + len(tokens))
            network.extend(self._embedded(tokens), before_RH, self._kept, self._num_rows)
            self._num_rows += len(tokens)

    @torch.inference_mode()
    def propose(self, anchor: int, budget: int) -> Proposal:
        """The draft's own greedy continuation, at most `budget` tokens."""
        found = self._chain(anchor, min(budget, self.max_proposal), 1)
        ids, log_probs = self._tokens(found.rows_TC)[:, 0], found.log_probs_TC[:, 0]
        return Proposal(tuple(ids.tolist()), log_probs=tuple(log_probs.tolist()))

    @torch.inference_mode()
    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        """The `count` best candidates of each slot of that continuation, and how likely each is after each candidate of
        the slot before: a step feeds all of them at once, on top of the greedy chain before them."""
        return self._chain(anchor, min(budget, self.max_proposal), count).as_table(self._shared.token_ids_K)

    @torch.inference_mode()
    def scores(self, anchor: int) -> tuple[NDArray[np.float32], NDArray[np.int64] | None]:
        """Logits [T, K] of the slots of the greedy chain, and the target ids [K] they belong to (None = 0..V-1)."""
        logits: list[Tensor] = []
        self._chain(anchor, self.max_proposal, 1, logits)
        ids = self._shared.token_ids_K
        return torch.cat(logits).cpu().numpy(), None if ids is None else ids.cpu().numpy()

    def _chain(self, anchor: int, num_slots: int, count: int, logits: list[Tensor] | None = None) -> Transitions:
        """Candidates of `num_slots` slots; row 0 of each step is the chain. `logits` collects that row's, [1, K]."""
        shared, network = self._shared, self._shared.network
        assert self._last_1H is not None, "propose needs a prompt"
        count = min(count, len(shared.head_KH))
        self._reserve(self._num_rows + num_slots + count)
        hidden_1H = self._last_1H
        tokens_C = torch.tensor([anchor], device=hidden_1H.device)
        first = 0 if self._limit is None else max(0, self._num_rows - self._limit)
        rows, chances, tables = [], [], []
        for slot in range(num_slots):
            embedded_CH = shared.embed_VH[tokens_C]
            hidden_CH = hidden_1H.expand(len(tokens_C), -1)
            out_CH = network.step(embedded_CH, hidden_CH, self._kept, self._num_rows + slot, first)
            normed_CH = network.norm(out_CH)
            logits_CK = shared.score(normed_CH).float()
            if logits is not None:
                logits.append(logits_CK[:1])
            after_CK = logits_CK.log_softmax(-1)
            chances_C, rows_C = after_CK[0].topk(count)
            rows.append(rows_C)
            chances.append(chances_C)
            tables.append(after_CK[:, rows_C])
            tokens_C = self._tokens(rows_C)
            hidden_1H = (normed_CH if network.config.feeds_normed else out_CH)[:1]
        after = torch.stack(tables[1:]) if num_slots > 1 else chances[0].new_zeros(0, count, count)
        return Transitions(torch.stack(rows), torch.stack(chances), after)

    def _embedded(self, token_ids: Sequence[int]) -> Tensor:
        return self._shared.embed_VH[torch.tensor(token_ids, device=self._shared.embed_VH.device)]

    def _tokens(self, rows: Tensor) -> Tensor:
        """Target ids of scored rows."""
        ids = self._shared.token_ids_K
        return rows if ids is None else ids[rows]

    def _reserve(self, num_rows: int) -> None:
        """Room for so many rows in every layer."""
        if self._kept and self._kept[0].keys_KSD.shape[1] >= num_rows:
            return
        network, config = self._shared.network, self._shared.network.config
        shape = (config.num_key_value_heads, -(-num_rows // _BUCKET) * _BUCKET, config.head_dim)
        grown = []
        for number in range(config.num_hidden_layers):
            new = KeptRows(network.fc.weight.new_zeros(shape), network.fc.weight.new_zeros(shape))
            if self._kept:
                new.keys_KSD[:, : self._num_rows] = self._kept[number].keys_KSD[:, : self._num_rows]
                new.values_KSD[:, : self._num_rows] = self._kept[number].values_KSD[:, : self._num_rows]
            grown.append(new)
        self._kept = grown
