"""What all drafters of one block share: context keys and values, the forward of a block, logits of its slots.

Context rows are projected once per committed token and kept; the block's own rows are overwritten by the next block.
Rows wait until the next block needs them, so that a draft that is not asked costs next to nothing.
How slots become tokens is the drafter's own: a subclass of `BlockSession` with one method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash.backends.torch.draft_attention import ContextKV
from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.drafters.table import candidate_table
from dflash.backends.torch.fused import packed
from dflash.backends.torch.packing import has_room
from dflash.backends.torch.target import TorchTarget
from dflash.types import CandidateTable, Proposal

_BUCKET = 512
"""Context storage grows in these steps (rows)."""
_WAITING = 64
"""Rows that may wait to be projected: each keeps the features of its round's forward alive."""


class BlockDrafter:
    """Weights side, shared by sessions: the network, the embedding its block is made of and the head it scores with."""

    def __init__(self, network: DraftModel, target: TorchTarget) -> None:
        """
        Args:
            network: the draft, on the target's device.
            target: lends embedding and head where the draft has none (of the head, the rows of the draft's vocabulary).
        """
        config = network.config
        self.network = network
        dtype = network.fc.weight.dtype
        self.block_ids = torch.full((1, 1, config.block_size), config.mask_token_id, device=target.device)
        self.embed_VH = own_or_target(network.embed_tokens, target.embed_weight).to(dtype)
        self.token_ids_K: Tensor | None = None
        """Target id of each scored row; None = row j is id j."""
        head = own_or_target(network.lm_head, target.head_weight)
        self.rows_K: Tensor | None = None
        """Rows of the draft's own tables over its vocabulary (head, W2) that are scored; None = all."""
        if network.vocabulary is not None:
            # The mask id must never be proposed; here it simply is no candidate.
            kept = [row for row, token in enumerate(network.vocabulary) if token != config.mask_token_id]
            ids = torch.tensor(network.vocabulary, device=target.device)
            self.rows_K = torch.tensor(kept, device=target.device)
            self.token_ids_K = ids[self.rows_K]
            rows = self.token_ids_K if head.shape[0] == config.vocab_size else self.rows_K
            head = head[rows.to(head.device)]
        # A target that is spread over several devices may keep its head on another one than its embedding.
        self.head_KH = head.to(device=target.device, dtype=dtype)
        self.score = scorer(self.head_KH, target)
        """Logits [..., K] of normed states [..., H], without the draft's own scale or cap."""

    def session(self) -> BlockSession:
        """A fresh drafter for one request."""
        raise NotImplementedError

    def tokens(self, rows: Tensor) -> Tensor:
        """Target ids of scored rows."""
        return rows if self.token_ids_K is None else self.token_ids_K[rows]


def own_or_target(own: nn.Module | None, theirs_VH: Tensor) -> Tensor:
    """The draft's own embedding or head, else the target's. Many drafts carry a frozen copy of the target's, which is
    then held once: gigabytes on large vocabularies."""
    if own is None:
        return theirs_VH
    weight = own.weight
    assert isinstance(weight, Tensor)
    alike = (weight.shape, weight.dtype, weight.device) == (theirs_VH.shape, theirs_VH.dtype, theirs_VH.device)
    if alike and torch.equal(weight, theirs_VH):
        own.weight = nn.Parameter(theirs_VH.detach(), requires_grad=False)
        return theirs_VH
    return weight


def scorer(head_KH: Tensor, target: TorchTarget) -> Callable[[Tensor], Tensor]:
    """The product with a head's rows, on packed weights where there is room; the target's own head is packed once."""
    if head_KH.data_ptr() == target.head_weight.data_ptr() and head_KH.shape == target.head_weight.shape:
        return target.head
    head = nn.Linear(head_KH.shape[1], head_KH.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(head_KH, requires_grad=False)
    return packed(head) if has_room([head_KH]) else head


class BlockSession:
    """One request's drafter state; implements `dflash.core.protocols.Drafter`."""

    def __init__(self, shared: BlockDrafter) -> None:
        self._shared = shared
        self._num_context = 0
        self._waiting: list[Tensor] = []  # features of rows behind those in the storage
        self._num_waiting = 0
        self._storage: list[ContextKV] = []
        self._limit: int | None = None

    def limit_context(self, num_rows: int) -> None:
        """Let layers with full attention see the newest `num_rows` context rows only: a block then costs the same at
        any length of the text. Layers with a window of their own keep it."""
        self._limit = num_rows

    @property
    def max_proposal(self) -> int:
        """Most tokens one block proposes."""
        return self._shared.network.config.max_proposal

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        """Keep the features [len(token_ids), taps x hidden] of newly committed tokens for the next block."""
        assert features is not None
        assert features.shape[0] == len(token_ids)
        self._waiting.append(features)
        self._num_waiting += len(token_ids)
        if self._num_waiting > _WAITING:
            self._project()

    @torch.inference_mode()
    def _project(self) -> None:
        """Turn all waiting features into context keys and values, in one go."""
        if not self._waiting:
            return
        network, start, end = self._shared.network, self._num_context, self._num_context + self._num_waiting
        features = self._waiting[0] if len(self._waiting) == 1 else torch.cat(self._waiting)
        positions = torch.arange(start, end, device=features.device)[None]
        rows = network.project_context(features[None].to(network.fc.weight.dtype), positions)
        self._reserve(end + network.config.block_size, rows)
        for kept, new in zip(self._storage, rows, strict=True):
            kept.keys_NKSD[:, :, start:end] = new.keys_NKSD
            kept.values_NKSD[:, :, start:end] = new.values_NKSD
        self._num_context, self._waiting, self._num_waiting = end, [], 0

    @torch.inference_mode()
    def propose(self, anchor: int, budget: int) -> Proposal:
        """Tokens of the first `budget` predicting slots. The block runs at full width, as the draft was trained."""
        hidden_TH = self._hidden(anchor)[: min(budget, self.max_proposal)]
        return self._pick(hidden_TH, self._logits(hidden_TH), anchor)

    @torch.inference_mode()
    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        """The `count` best candidates of each of the first `budget` predicting slots, for chains and trees."""
        hidden_TH = self._hidden(anchor)[: min(budget, self.max_proposal)]
        return self._table(hidden_TH, self._logits(hidden_TH), anchor, count)

    def _pick(self, hidden_TH: Tensor, logits_TK: Tensor, anchor: int) -> Proposal:
        """Turn the states and logits of the predicting slots into a proposal."""
        raise NotImplementedError

    def _table(self, hidden_TH: Tensor, logits_TK: Tensor, anchor: int, count: int) -> CandidateTable:
        """Turn them into candidates; here of slots that do not depend on one another."""
        return candidate_table(logits_TK, self._shared.token_ids_K, count)

    def _hidden(self, anchor: int) -> Tensor:
        """Final states [T, H] of the slots that predict, for the block behind the context."""
        self._project()
        shared = self._shared
        network, n = shared.network, self._num_context
        ids = shared.block_ids.clone()
        ids[0, 0, 0] = anchor
        contexts = [self._context(number) for number in range(len(self._storage))]
        position = torch.full((1, 1), n, device=ids.device)
        hidden_BH: Tensor = network(shared.embed_VH[ids], position, contexts)[0, 0]
        return hidden_BH if network.config.anchor_predicts else hidden_BH[1:]

    def _context(self, number: int) -> ContextKV:
        """Keys and values of layer `number` with room for the block, without rows that its window has left behind."""
        config, kept = self._shared.network.config, self._storage[number]
        window = config.attention_of(number).window
        reach = 0 if window is None else window if config.window_from_anchor else window - 1
        if window is None and self._limit is not None:
            window, reach = self._limit, self._limit
        first = 0 if window is None else max(0, self._num_context - reach)
        end = self._num_context + config.block_size
        return ContextKV(kept.keys_NKSD[:, :, first:end], kept.values_NKSD[:, :, first:end], config.block_size, first)

    def _logits(self, hidden_TH: Tensor) -> Tensor:
        """Logits [T, K] of the scored rows; the mask id is never the largest."""
        shared = self._shared
        logits = shared.network.finish_logits(shared.score(hidden_TH))
        if shared.token_ids_K is None:
            logits[:, shared.network.config.mask_token_id] = -torch.inf
        return logits

    def _reserve(self, num_rows: int, like: Sequence[ContextKV]) -> None:
        if self._storage and self._storage[0].keys_NKSD.shape[2] >= num_rows:
            return
        capacity = -(-num_rows // _BUCKET) * _BUCKET
        grown: list[ContextKV] = []
        for number, rows in enumerate(like):
            n, heads, _, width = rows.keys_NKSD.shape
            pair = [rows.keys_NKSD.new_zeros(n, heads, capacity, width) for _ in range(2)]
            if self._storage:
                for new, old in zip(pair, self._storage[number][:2], strict=True):
                    new[:, :, : self._num_context] = old[:, :, : self._num_context]
            grown.append(ContextKV(pair[0], pair[1]))
        self._storage = grown
