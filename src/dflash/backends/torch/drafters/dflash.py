"""The DFlash v1 drafter: a block of tokens from one forward of the draft network (arXiv:2602.06036 §3).

Context keys and values are projected once per committed token and kept; the block's own rows are overwritten by the
next block. Proposals are the arg max of each slot, so q is a point mass (docs/algorithm.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash.backends.torch.draft_model import ContextKV, DraftModel
from dflash.backends.torch.target import TorchTarget
from dflash.types import Proposal

_BUCKET = 512
"""Context storage grows in these steps (rows)."""


class DFlashDrafter:
    """Weights side, shared by sessions: the network, and the rows of the target's head that it scores."""

    def __init__(self, network: DraftModel, target: TorchTarget) -> None:
        """
        Args:
            network: the draft, on the target's device.
            target: lends embedding and head (the rows of the draft's vocabulary, if it has one).
        """
        config = network.config
        self.network = network
        dtype = network.fc.weight.dtype
        self.block_ids = torch.full((1, 1, config.block_size), config.mask_token_id, device=target.device)
        self.embed_VH = target.embed_weight.to(dtype)
        self.token_ids_K: Tensor | None = None
        head = target.head_weight
        if network.vocabulary is not None:
            # The mask id must never be proposed; here it simply is no candidate.
            kept = [token for token in network.vocabulary if token != config.mask_token_id]
            self.token_ids_K = torch.tensor(kept, device=target.device)
            head = head[self.token_ids_K]
        self.head_KH = head.to(dtype)

    def session(self) -> DFlashSession:
        """A fresh drafter for one request."""
        return DFlashSession(self)


class DFlashSession:
    """One request's drafter state; implements `dflash.core.protocols.Drafter`."""

    def __init__(self, shared: DFlashDrafter) -> None:
        self._shared = shared
        self._num_context = 0
        self._storage: list[ContextKV] = []

    @property
    def max_proposal(self) -> int:
        """Most tokens one block proposes."""
        return self._shared.network.config.block_size - 1

    @torch.inference_mode()
    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        """Project the features [len(token_ids), taps x hidden] of newly committed tokens and keep the result."""
        assert features is not None
        assert features.shape[0] == len(token_ids)
        network, start = self._shared.network, self._num_context
        positions = torch.arange(start, start + len(token_ids), device=features.device)[None]
        rows = network.project_context(features[None].to(network.fc.weight.dtype), positions)
        self._reserve(start + len(token_ids) + network.config.block_size, rows)
        for kept, new in zip(self._storage, rows, strict=True):
            kept.keys_NKSD[:, :, start : start + len(token_ids)] = new.keys_NKSD
            kept.values_NKSD[:, :, start : start + len(token_ids)] = new.values_NKSD
        self._num_context += len(token_ids)

    @torch.inference_mode()
    def propose(self, anchor: int, budget: int) -> Proposal:
        """The arg max of slots 1..budget. The block runs at full width, as the draft was trained."""
        shared = self._shared
        block_size = shared.network.config.block_size
        ids = shared.block_ids.clone()
        ids[0, 0, 0] = anchor
        end = self._num_context + block_size
        contexts = [ContextKV(kv.keys_NKSD[:, :, :end], kv.values_NKSD[:, :, :end], block_size) for kv in self._storage]
        position = torch.full((1, 1), self._num_context, device=ids.device)
        hidden_BH = shared.network(shared.embed_VH[ids], position, contexts)[0, 0]
        logits = hidden_BH[1 : 1 + min(budget, block_size - 1)] @ shared.head_KH.T
        if shared.token_ids_K is None:
            logits[:, shared.network.config.mask_token_id] = -torch.inf
            best = logits.argmax(-1)
        else:
            best = shared.token_ids_K[logits.argmax(-1)]
        return Proposal(tuple(best.tolist()))

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
