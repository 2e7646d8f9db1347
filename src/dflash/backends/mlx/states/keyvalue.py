"""Keys and values of attention layers, over the whole context or a window of it, plain or quantised.

Rows are stored in the order in which they are fed, never as a ring: the rejected rows of a forward then lie behind the
committed length, where the next forward overwrites them, and nothing that a window still needs was overwritten to make
room for them. Of a tree the rows of the kept path move together. A window's storage moves up in large steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx.utils import tree_map

from dflash.backends.mlx.states.base import BUCKET, LayerState, Span
from dflash.core.tree import is_prefix, keys_seen
from dflash.errors import ConfigError

GROWTH = 1.5
"""Factor by which storage grows at least, so that copying it stays cheap in long texts."""

Stored = mx.array | tuple[mx.array, ...]
"""[B, kv_heads, keys, dim], or the three parts of quantised rows, each with the keys on the same axis."""


class KeyValueState(LayerState):
    """Implements what mlx-lm's attention layers ask of a KVCache or a RotatingKVCache."""

    supports_trees = True

    def __init__(self, span: Span, window: int | None = None) -> None:
        """`window`: keys that a row sees at most, itself included; None = the whole context."""
        self.span = span
        self.window = window
        self.rewinds = window is None  # a window's storage drops what it has left behind
        self.keys: Stored | None = None
        self.values: Stored | None = None
        self._base = 0  # position of the first stored row; whole buckets
        self._capacity = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """Write rows [B, kv_heads, rows, dim] at the span's start; return all keys and values that rows may see."""
        rows = (self._encoded(keys), self._encoded(values))
        assert keys.shape[2] == self.span.num_rows, "the forward is not the one that was announced"
        self._reserve(rows)
        assert self.keys is not None and self.values is not None
        start = self.span.start - self._base
        for stored, new in ((self.keys, rows[0]), (self.values, rows[1])):
            for to, part in zip(_parts(stored), _parts(new), strict=True):
                to[..., start : start + keys.shape[2], :] = part
        first, end = self._seen()
        return self._sliced(first, end)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | str | None:
        """The mask that mlx-lm's models ask for before their layers run, for `N` rows: None, "causal" or bool
        [1, 1, N, keys]. Also when the storage moves within the forward, the keys returned are those told here."""
        start, window = self.span.start, window_size or self.window
        first, end = self._seen()
        if self.span.tree is not None:
            return mx.array(keys_seen(start, N, self.span.tree, range(first, end), window))[None, None]
        if not self.span.exact and (window is None or start + N - first <= window):
            if N == 1:
                return None
            if not return_array:
                return "causal"
        rows = mx.arange(start, start + N)[:, None]
        keys = mx.arange(first, end)[None]
        mask: mx.array = keys <= rows
        mask = mask if window is None else mask & (keys > rows - window)
        return mask[None, None]  # with the axes of batch and heads: some models index them

    def commit(self, path: Sequence[int]) -> None:
        if is_prefix(path):
            return  # moving the shared length is all there is to do
        start = self.span.start - self._base
        rows = mx.array(list(path)) + start
        for part in self.arrays():
            part[..., start : start + len(path), :] = mx.take(part, rows, axis=-2)

    def free(self) -> None:
        self.keys = self.values = None
        self._base = self._capacity = 0

    def empty(self) -> bool:
        """Whether no row was written yet (asked by some of mlx-lm's models)."""
        return self.keys is None

    def size(self) -> int:
        """Committed tokens."""
        return self.span.start

    def arrays(self) -> list[mx.array]:
        return [part for stored in (self.keys, self.values) if stored is not None for part in _parts(stored)]

    def committed(self) -> Sequence[mx.array]:
        if self.keys is None:
            return []
        first = 0 if self.window is None else max(0, self.span.start - self.window + 1)
        return [part for stored in self._sliced(first, self.span.start) for part in _parts(stored)]

    def _encoded(self, rows: mx.array) -> Stored:
        """The form in which rows are stored."""
        return rows

    def _seen(self) -> tuple[int, int]:
        """Positions [first, end) of the keys that the running forward gets."""
        span = self.span
        first = 0 if self.window is None else max(0, span.start - self.window + 1)
        end = span.start + span.num_rows
        if not span.exact:
            return first, end
        # A row's place among the keys must not depend on where its forward began, so windows too start at a bucket.
        first = first // BUCKET * BUCKET
        return first, first + span.lengths.least(max(end - first, span.least_keys))

    def _sliced(self, first: int, end: int) -> tuple[Stored, Stored]:
        assert self.keys is not None and self.values is not None
        if first == self._base and end - first == self._capacity:
            return self.keys, self.values

        def cut(part: mx.array) -> mx.array:
            return part[..., first - self._base : end - self._base, :]

        return tree_map(cut, self.keys), tree_map(cut, self.values)

    def _reserve(self, like: tuple[Stored, Stored]) -> None:
        """Make room for the running forward; moves a window's storage up when it is full."""
        first, end = self._seen()
        if self.keys is not None and end - self._base <= self._capacity:
            return
        base = 0 if self.window is None else first // BUCKET * BUCKET
        least = end - base if self.keys is None else max(end - base, int(GROWTH * (self.span.start - base)))
        self._capacity = -(-least // BUCKET) * BUCKET
        kept = self.span.start - base

        def grown(new: mx.array, old: mx.array | None = None) -> mx.array:
            # Zeros, not garbage: masked values are multiplied by a probability of zero, which leaves a NaN a NaN.
            storage = mx.zeros((*new.shape[:-2], self._capacity, new.shape[-1]), new.dtype)
            if old is not None:
                storage[..., :kept, :] = old[..., base - self._base : base - self._base + kept, :]
            return storage

        if self.keys is None:
            self.keys, self.values = tree_map(grown, like[0]), tree_map(grown, like[1])
        else:
            self.keys, self.values = tree_map(grown, like[0], self.keys), tree_map(grown, like[1], self.values)
        self._base = base


class QuantizedKeyValueState(KeyValueState):
    """Keys and values of the whole context, quantised row by row as mlx-lm's QuantizedKVCache has them, so that a row's
    bits do not depend on which others were fed with it."""

    def __init__(self, span: Span, bits: int, group_size: int) -> None:
        super().__init__(span)
        self.bits = bits
        self.group_size = group_size

    def _encoded(self, rows: mx.array) -> Stored:
        """Raises ConfigError for heads that cannot be quantised."""
        if rows.shape[-1] % self.group_size:
            raise ConfigError(
                f"kv_bits needs attention heads whose size is a multiple of {self.group_size}, and not "
                f"{rows.shape[-1]}: leave it out for this target."
            )
        return tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits))


def _parts(stored: Stored) -> tuple[mx.array, ...]:
    return stored if isinstance(stored, tuple) else (stored,)
