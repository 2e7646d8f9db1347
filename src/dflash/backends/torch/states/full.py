"""Keys and values of all positions. Also holds the latents of multi-head latent attention, which are one head whose
"keys" and "values" differ in width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dflash.backends.torch.compat import CacheLayerMixin, LayerSpec
from dflash.backends.torch.states.base import LayerState, Span, gather, grown
from dflash.core.tree import is_prefix


class FullKeyValueState(LayerState, CacheLayerMixin):
    """Keys and values, [B, kv_heads, capacity, head_dim] each, preallocated.

    Rolling back a chain is free: rejected rows lie behind the committed length and are overwritten. Of a tree the
    rows of the kept path move together.
    """

    supports_trees = True
    rewinds = True
    is_sliding = False
    is_croppable = False  # never cropped by the library: `commit` is the only way

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, span: Span, spec: LayerSpec) -> None:
        LayerState.__init__(self, span, spec)
        CacheLayerMixin.__init__(self)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate storage shaped after the first rows: [B, kv_heads, rows, head_dim]."""
        self.keys = grown(key_states[:, :, :0], self.span.capacity)
        self.values = grown(value_states[:, :, :0], self.span.capacity)
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,  # [B, kv_heads, rows, head_dim]
        value_states: torch.Tensor,  # [B, kv_heads, rows, head_dim]
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows of the running forward; return keys and values [B, kv_heads, span.num_keys, head_dim]."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        keys, values, span = self.keys, self.values, self.span
        assert keys is not None
        assert values is not None
        assert key_states.shape[2] == span.num_rows
        keys.narrow(2, span.start, span.num_rows).copy_(key_states)
        values.narrow(2, span.start, span.num_rows).copy_(value_states)
        if span.num_keys == span.capacity:
            return keys, values
        return keys.narrow(2, 0, span.num_keys), values.narrow(2, 0, span.num_keys)

    def reserve(self) -> None:
        if self.keys is not None and self.values is not None:
            self.keys = grown(self.keys, self.span.capacity)
            self.values = grown(self.values, self.span.capacity)

    def commit(self, path: Sequence[int]) -> None:
        if is_prefix(path) or self.keys is None or self.values is None:
            return  # moving the shared length is all there is to do
        for stored in (self.keys, self.values):
            gather(stored, self.span.start, path)

    def free(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False

    def committed(self) -> list[torch.Tensor]:
        if self.keys is None or self.values is None:
            return []
        return [stored[:, :, : self.span.start] for stored in (self.keys, self.values)]
