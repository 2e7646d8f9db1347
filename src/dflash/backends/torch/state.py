"""The cache of one session: the states of all layers, in the form that Transformers models take, rolled back together.

Knows when layers grow, begin and commit; does not know how a kind of layer stores its state (`states/`), models, masks
or when to verify. A new kind of state is a file in `states/` and a row in its table; tests/backends/test_state.py runs
the rollback oracle over every kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dflash.backends.torch.compat import Cache, LayerSpec
from dflash.backends.torch.states import KINDS
from dflash.backends.torch.states.base import BUCKET, LayerState, Span
from dflash.core.key_lengths import BUCKETS, KeyLengths
from dflash.core.tree import is_prefix
from dflash.errors import UnsupportedModel

__all__ = ["BUCKET", "SessionCache", "check_states", "session_cache"]

GROWTH = 1.5
"""Factor by which storage grows at least, so that copying it stays cheap in long texts."""


class SessionCache(Cache):
    """The states of all layers of one session, in the form that Transformers models take as their cache."""

    layers: list[LayerState]  # type: ignore[assignment]  # narrower than the library's list

    def __init__(self, specs: Sequence[LayerSpec], lengths: KeyLengths = BUCKETS, *, bucket: int = BUCKET) -> None:
        """
        Args:
            specs: what Transformers would keep for each layer (compat.layer_specs).
            lengths: numbers of keys that are returned in exact mode.
            bucket: whole buckets of so many keys are stored.
        """
        self.span = Span(bucket, lengths)
        layers: Any = [KINDS[spec.state](self.span, spec) for spec in specs]
        Cache.__init__(self, layers=layers)  # not that of a class we stand in for (`session_cache`)

    @property
    def num_tokens(self) -> int:
        """Committed tokens."""
        return self.span.start

    @property
    def capacity(self) -> int:
        """Keys that the storage of full layers holds without growing: a multiple of the bucket."""
        return self.span.capacity

    @property
    def supports_trees(self) -> bool:
        """Whether all layers can hold branches."""
        return all(layer.supports_trees for layer in self.layers)

    @property
    def rewinds(self) -> bool:
        """Whether all layers can take committed rows back (`rewind`)."""
        return all(layer.rewinds for layer in self.layers)

    def rewind(self, num_tokens: int) -> None:
        """Go back to the first `num_tokens` committed tokens, as if no other had been fed."""
        assert self.rewinds
        assert num_tokens <= self.span.start
        self.span.start, self.span.num_rows = num_tokens, 0

    def reserve(self, num_keys: int) -> None:
        """Make room for `num_keys` keys in all, rounded up to whole buckets. Never shrinks."""
        span = self.span
        if num_keys > span.capacity:
            span.capacity = span.whole_buckets(max(num_keys, int(GROWTH * span.capacity)))
            for layer in self.layers:
                layer.reserve()

    def begin(self, num_rows: int, *, exact: bool) -> int:
        """Prepare a forward of `num_rows` rows behind the committed ones; returns the number of keys that layers with
        full context give to the model: one of `lengths` (the tail must be masked) or just those written so far."""
        span = self.span
        num_keys = span.start + num_rows
        if exact:
            num_keys = span.lengths.least(max(num_keys, span.least_keys))
        self.reserve(num_keys)
        span.num_rows, span.num_keys, span.exact = num_rows, num_keys, exact
        for layer in self.layers:
            layer.begin()
        return num_keys

    def return_at_least(self, num_keys: int, lead: int = 0) -> None:
        """From now on return at least `num_keys` keys in exact mode; layers with a window return
        `lead` masked keys in front as well, if they are still empty (the probe's tests)."""
        self.span.least_keys, self.span.lead = num_keys, lead

    def keeps(self, path: Sequence[int]) -> bool:
        """Whether `commit(path)` is possible; if not, the rows must be fed again without the rejected ones."""
        return len(path) in (0, self.span.num_rows) or all(layer.keeps_prefixes for layer in self.layers)

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
        span.start = span.num_rows = span.num_keys = span.capacity = span.least_keys = span.lead = 0

    def update(
        self,
        key_states: torch.Tensor,  # [B, kv_heads, rows, head_dim]
        value_states: torch.Tensor,  # [B, kv_heads, rows, head_dim]
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model's attention layers."""
        layer: Any = self.layers[layer_idx]
        keys_and_values: tuple[torch.Tensor, torch.Tensor] = layer.update(key_states, value_states)
        return keys_and_values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed tokens: the same for all layers, also for those that count none themselves."""
        return self.span.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys returned, position of the first one) of a layer, for masks that Transformers builds itself."""
        return self.layers[layer_idx].get_mask_sizes(query_length)


def check_states(specs: Sequence[LayerSpec], model_name: str) -> None:
    """Refuse a model with a layer state that cannot be rolled back exactly.

    Raises:
        UnsupportedModel: names the first such layer, the class of its state and what is supported.
    """
    for layer, spec in enumerate(specs):
        if spec.state not in KINDS:
            raise UnsupportedModel(
                f"layer {layer} of {model_name} keeps its state in a {spec.state}, which this version cannot roll "
                f"back losslessly; use a target whose layers keep one of {', '.join(KINDS)}."
            )


class _LinearStates:
    """What a model asks of a cache of its own that keeps one recurrent state per layer: our layers answer."""

    layers: list[Any]

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """The state [B, heads, ...] that the running forward starts from; None before the first token."""
        state: torch.Tensor | None = self.layers[layer_idx].recurrent_states.get(0)
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """The state after the last row of the running forward."""
        self.layers[layer_idx].update_recurrent_state(linear_cache)

    def __len__(self) -> int:
        return len(self.layers)


def session_cache(own: type[Cache] | None) -> type[SessionCache]:
    """The class of a model's session caches: `SessionCache`, or one that passes for the model's own cache class."""
    if own is None:
        return SessionCache
    return type(f"Session{own.__name__}", (_LinearStates, SessionCache, own), {})
