"""Keys and values of a window: a layer whose rows see the last `window` positions only, or those of their own chunk.

A full ring buffer cannot be rolled back: rejected rows have overwritten the oldest keys of the window. So the window
*and* all fed rows are held until the commit. Storage is a piece of the text that moves on in whole pages, so that a key
keeps its place in the kernel's blocks and exact mode stays exact (docs/exactness.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dflash.backends.torch.compat import LayerSpec
from dflash.backends.torch.states.base import Span, gather, grown
from dflash.backends.torch.states.full import FullKeyValueState
from dflash.core.key_lengths import BLOCK
from dflash.core.tree import is_prefix

PAGE = BLOCK
"""Storage moves on in steps of so many keys, and so does the first key returned in exact mode. CPU attention reads keys
in such blocks: a masked block in front of the others changes no bit; exactness.py checks it at load."""


class SlidingKeyValueState(FullKeyValueState):
    """Keys and values of the positions `base`.., [B, kv_heads, held, head_dim] each."""

    is_sliding = True
    rewinds = False  # the rows that come back into the window may be gone

    def __init__(self, span: Span, spec: LayerSpec) -> None:
        super().__init__(span, spec)
        assert spec.window is not None
        self.window = spec.window
        self._base = 0
        """Position of the first key in storage."""
        self._first = 0
        """Position of the first key that the running forward gets."""
        self._num_keys = 0
        """Keys that it gets."""

    def begin(self) -> None:
        span = self.span
        self._first = self._oldest()
        self._num_keys = span.start + span.num_rows - self._first
        if span.exact:
            self._first = self._page()
            longest = self.window - 1 + PAGE + span.num_rows  # no forward needs more, however long the text
            least = min(span.least_keys, span.lengths.least(longest))
            self._num_keys = span.lengths.least(max(span.start + span.num_rows - self._first, least))

    def _oldest(self) -> int:
        """First position that the first row of the forward may see."""
        return max(0, self.span.start - self.window + 1)

    def _page(self) -> int:
        return self._oldest() // PAGE * PAGE - self.span.lead

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._num_keys, self._first

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._base = self._page()
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,  # [B, kv_heads, rows, head_dim]
        value_states: torch.Tensor,  # [B, kv_heads, rows, head_dim]
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows of the running forward; return keys and values [B, kv_heads, keys, head_dim] of the window
        of its first row and everything behind."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        span = self.span
        assert key_states.shape[2] == span.num_rows
        self._make_room()
        assert self.keys is not None
        assert self.values is not None
        at, first = span.start - self._base, self._first - self._base
        self.keys.narrow(2, at, span.num_rows).copy_(key_states)
        self.values.narrow(2, at, span.num_rows).copy_(value_states)
        return self.keys.narrow(2, first, self._num_keys), self.values.narrow(2, first, self._num_keys)

    def _make_room(self) -> None:
        """Storage must hold all keys that the forward gets: forget pages that lie before the window, else grow."""
        assert self.keys is not None
        assert self.values is not None
        end, held = self._first + self._num_keys, self.keys.shape[2]
        if end - self._base <= held:
            return
        base = self._page()
        room = max(held, self.span.whole_buckets(end - base))
        if room > held:
            room += PAGE  # so that most forwards move nothing
        kept = slice(base - self._base, self.span.start - self._base)
        self.keys, self.values = (grown(stored[:, :, kept], room) for stored in (self.keys, self.values))
        self._base = base

    def reserve(self) -> None:
        pass  # the whole text is never held

    def commit(self, path: Sequence[int]) -> None:
        if is_prefix(path) or self.keys is None or self.values is None:
            return
        for stored in (self.keys, self.values):
            gather(stored, self.span.start - self._base, path)

    def free(self) -> None:
        super().free()
        self._base = 0

    def committed(self) -> list[torch.Tensor]:
        if self.keys is None or self.values is None:
            return []
        kept = slice(self._oldest() - self._base, self.span.start - self._base)
        return [stored[:, :, kept] for stored in (self.keys, self.values)]
