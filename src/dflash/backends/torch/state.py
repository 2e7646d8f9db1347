"""Layer states of a target that can be rolled back: one class per kind of state, and the cache that holds them.

Knows how keys and values are stored, grown, returned to the model and cropped (docs/exactness.md). Does not know
models, masks, sampling or when to verify. A new kind of layer state is a class here, a row in `KINDS` and a row in the
rollback oracle of tests/backends/test_state.py.

The contract of a forward: `SessionCache.begin(rows)` says where the coming rows are written and how many keys the model
gets back; the model writes through `update`; `commit(path)` keeps some of these rows: of a chain the first ones, of a
tree those from the root to a node. What lies behind the committed length is garbage that the next forward overwrites
and that masks never let a row see.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from dflash.backends.torch.compat import Cache, CacheLayerMixin
from dflash.errors import UnsupportedModel

BUCKET = 128
"""In exact mode the model gets a multiple of this many keys, so that the shape of attention seldom changes. CPU kernels
give the same bits for all multiples (tried: 128 to 2048), and attention costs as many keys as it gets; exactness.py
checks it at load."""
GROWTH = 1.5
"""Factor by which storage grows at least, so that copying it stays cheap in long texts."""


@dataclass(slots=True)
class Span:
    """Where the running forward writes and what it gets back; one object shared by all layers of a session."""

    start: int = 0
    """First row written = committed length."""
    num_rows: int = 0
    """Rows fed, padding included."""
    num_keys: int = 0
    """Keys returned to the model."""
    capacity: int = 0
    """Keys that storage must hold."""
    least_keys: int = 0
    """Keys that are returned at least when whole buckets are."""


class LayerState(CacheLayerMixin):
    """State of one layer. Subclasses store it; `commit` must leave it as if only the kept rows had been fed."""

    is_sliding = False
    supports_trees = False
    """Whether rows of one forward may belong to different branches: `commit` then takes paths that are no prefix."""

    def __init__(self, span: Span) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the library gives no types here
        self.span = span

    @abstractmethod
    def reserve(self) -> None:
        """Grow storage to `span.capacity`; what is committed stays."""

    @abstractmethod
    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows `path` of the last forward (ascending), as if only these had been fed. Called before the
        committed length moves."""

    @abstractmethod
    def free(self) -> None:
        """Give the memory back."""

    def get_seq_length(self) -> int:
        """Committed tokens."""
        return self.span.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys returned, offset of the first one), for masks that Transformers builds itself."""
        return self.span.num_keys, 0

    def get_max_length(self) -> int:
        """No limit of its own (-1): the session checks the context length."""
        return -1

    get_max_cache_shape = get_max_length  # its name before Transformers 5.20


class FullKeyValueState(LayerState):
    """Keys and values of all positions, [B, kv_heads, capacity, head_dim] each, preallocated.

    Rolling back a chain is free: rejected rows lie behind the committed length and are overwritten. Of a tree the
    rows of the kept path move together.
    """

    supports_trees = True

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate storage shaped after the first rows: [B, kv_heads, rows, head_dim]."""
        self.keys = _grown(key_states[:, :, :0], self.span.capacity)
        self.values = _grown(value_states[:, :, :0], self.span.capacity)
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
            self.keys = _grown(self.keys, self.span.capacity)
            self.values = _grown(self.values, self.span.capacity)

    def commit(self, path: Sequence[int]) -> None:
        if is_prefix(path) or self.keys is None or self.values is None:
            return  # moving the shared length is all there is to do
        start = self.span.start
        rows = torch.tensor(path, device=self.keys.device) + start
        for stored in (self.keys, self.values):
            stored[:, :, start : start + len(path)] = stored.index_select(2, rows)

    def free(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False


KINDS: Mapping[str, type[LayerState]] = MappingProxyType({"DynamicLayer": FullKeyValueState})
"""Transformers' class of a layer's state -> ours. What is not listed cannot be decoded losslessly yet."""


class SessionCache(Cache):
    """The states of all layers of one session, in the form that Transformers models take as their cache."""

    layers: list[LayerState]  # type: ignore[assignment]  # narrower than the library's list

    def __init__(self, state_names: Sequence[str], bucket: int = BUCKET) -> None:
        """
        Args:
            state_names: Transformers' class name of each layer's state (compat.layer_state_names).
            bucket: whole buckets of so many keys are stored and, on demand, returned.
        """
        self.span = Span()
        self.bucket = bucket
        super().__init__(layers=[KINDS[name](self.span) for name in state_names])

    @property
    def num_tokens(self) -> int:
        """Committed tokens."""
        return self.span.start

    @property
    def capacity(self) -> int:
        """Keys that storage holds without growing: a multiple of the bucket."""
        return self.span.capacity

    def reserve(self, num_keys: int) -> None:
        """Make room for `num_keys` keys in all, rounded up to whole buckets. Never shrinks."""
        if num_keys > self.span.capacity:
            self.span.capacity = self._whole_buckets(max(num_keys, int(GROWTH * self.span.capacity)))
            for layer in self.layers:
                layer.reserve()

    def begin(self, num_rows: int, *, buckets: bool) -> int:
        """Prepare a forward of `num_rows` rows behind the committed ones; returns the number of keys that the model
        gets back: whole buckets (the tail must be masked) or just those written so far."""
        span = self.span
        num_keys = span.start + num_rows
        if buckets:
            num_keys = self._whole_buckets(max(num_keys, span.least_keys))
        self.reserve(num_keys)
        span.num_rows, span.num_keys = num_rows, num_keys
        return num_keys

    def return_at_least(self, num_keys: int) -> None:
        """From now on return at least `num_keys` keys where whole buckets are returned (the probe's test)."""
        self.span.least_keys = num_keys

    def _whole_buckets(self, num_keys: int) -> int:
        return -(-num_keys // self.bucket) * self.bucket

    def update(
        self,
        key_states: torch.Tensor,  # [B, kv_heads, rows, head_dim]
        value_states: torch.Tensor,  # [B, kv_heads, rows, head_dim]
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model's attention layers."""
        return self.layers[layer_idx].update(key_states, value_states)

    @property
    def supports_trees(self) -> bool:
        """Whether all layers can hold branches."""
        return all(layer.supports_trees for layer in self.layers)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows `path` of the last forward (ascending; empty = none) and forget the rest; once per forward."""
        assert all(before < after for before, after in zip((-1, *path), (*path, self.span.num_rows), strict=True)), path
        assert is_prefix(path) or self.supports_trees, path
        for layer in self.layers:
            layer.commit(path)
        self.span.start += len(path)
        self.span.num_rows = 0

    def free(self) -> None:
        """Give the memory of all layers back and forget all tokens."""
        for layer in self.layers:
            layer.free()
        span = self.span
        span.start = span.num_rows = span.num_keys = span.capacity = span.least_keys = 0


def is_prefix(path: Sequence[int]) -> bool:
    """Whether an ascending path is 0, 1, 2 ..., as a chain's is."""
    return not path or path[-1] == len(path) - 1


def check_states(state_names: Sequence[str], model_name: str) -> None:
    """Refuse a model with a layer state that cannot be rolled back exactly.

    Raises:
        UnsupportedModel: names the first such layer, the class of its state and what is supported.
    """
    for layer, name in enumerate(state_names):
        if name not in KINDS:
            raise UnsupportedModel(
                f"layer {layer} of {model_name} keeps its state in a {name}, which this version cannot roll back "
                "losslessly; use a target whose layers all attend to the full context (every layer a DynamicLayer)."
            )


def _grown(tensor: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Copy of `tensor` [B, heads, keys, dim] with room for `num_keys` keys. Zeros, not empty: masked values are
    multiplied by a probability of zero, and zero times an uninitialised NaN is NaN."""
    batch, heads, kept, dim = tensor.shape
    grown = tensor.new_zeros((batch, heads, num_keys, dim))
    grown[:, :, :kept] = tensor
    return grown
