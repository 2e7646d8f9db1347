"""The states of all layers of one session, and the table of kinds that can be rolled back (`states/`).

Knows which of mlx-lm's caches each kind stands for; does not know models, masks or when to verify. A new kind is a file
in `states/`, a row in `KINDS` and a row in the rollback oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from dflash.backends.mlx.positions import RowPositions
from dflash.backends.mlx.states.base import LayerState, Span
from dflash.backends.mlx.states.hybrid import HybridState
from dflash.backends.mlx.states.keyvalue import KeyValueState, QuantizedKeyValueState
from dflash.backends.mlx.states.recurrent import RecurrentState
from dflash.core.key_lengths import BUCKETS, KeyLengths
from dflash.core.tree import is_prefix, row_positions
from dflash.errors import UnsupportedModel
from dflash.types import Proposal

QUANTISED_GROUP = 64
"""Values that share a scale in quantised keys and values, as in mlx-lm."""


def _full(span: Span, native: Any, kv_bits: int | None) -> LayerState:
    return KeyValueState(span) if kv_bits is None else QuantizedKeyValueState(span, kv_bits, QUANTISED_GROUP)


def _window(span: Span, native: Any, kv_bits: int | None) -> LayerState:
    return KeyValueState(span, window=native.max_size)


def _recurrent(span: Span, native: Any, kv_bits: int | None) -> LayerState:
    return RecurrentState(span, len(native.cache))


def _hybrid(span: Span, native: Any, kv_bits: int | None) -> LayerState:
    return HybridState(span, [_state(span, part, kv_bits) for part in native.caches])


KINDS: Mapping[str, Callable[[Span, Any, int | None], LayerState]] = MappingProxyType(
    {"KVCache": _full, "RotatingKVCache": _window, "ArraysCache": _recurrent, "CacheList": _hybrid}
)
"""mlx-lm's class of a layer's cache -> (span, that cache, bits of keys and values) -> ours. What is not listed cannot
be decoded losslessly yet."""


def _state(span: Span, native: Any, kv_bits: int | None) -> LayerState:
    return KINDS[type(native).__name__](span, native, kv_bits)


class SessionCache:
    """All layers' states; `layers` is what mlx-lm's models take as their cache."""

    def __init__(
        self,
        natives: Sequence[Any],
        kv_bits: int | None = None,
        *,
        counted_on: bool = False,
        lengths: KeyLengths = BUCKETS,
    ) -> None:
        """
        Args:
            natives: the caches that mlx-lm would use for this model, checked by `check_states`.
            kv_bits: quantise keys and values of the whole context to so many bits; windows stay as they are.
            counted_on: of `RowPositions`.
            lengths: numbers of keys that attention gets in exact mode.
        """
        self.span = Span(lengths=lengths)
        self._counted_on = counted_on
        self.layers = [_state(self.span, native, kv_bits) for native in natives]

    @property
    def num_tokens(self) -> int:
        """Committed tokens."""
        return self.span.start

    @property
    def keeps_prefixes(self) -> bool:
        """Whether every state can keep a part of a forward."""
        return all(layer.keeps_prefixes for layer in self.layers)

    @property
    def supports_trees(self) -> bool:
        """Whether every state can hold branches."""
        return all(layer.supports_trees for layer in self.layers)

    @property
    def rewinds(self) -> bool:
        """Whether every state can take committed tokens back (`rewind`)."""
        return all(layer.rewinds for layer in self.layers)

    def rewind(self, num_tokens: int) -> None:
        """Take all but the first `num_tokens` committed tokens back, and forget what was fed and not committed."""
        assert self.rewinds and 0 <= num_tokens <= self.num_tokens
        self.span.start, self.span.num_rows = num_tokens, 0

    def begin(self, num_rows: int, *, exact: bool, tree: Proposal | None = None) -> None:
        """Prepare a forward of `num_rows` rows behind the committed ones; what the last one fed and nobody committed is
        forgotten.

        Args:
            exact: attention gets one of `lengths` keys, the unused ones masked.
            tree: what the first rows are, if not a chain.
        """
        span = self.span
        if span.num_rows:
            self.commit(())
        span.num_rows, span.exact, span.tree = num_rows, exact, tree
        span.positions = None
        if tree is not None:
            positions = row_positions(span.start, num_rows, tree)
            span.positions = RowPositions(positions, counted_on=self._counted_on)
        for layer in self.layers:
            layer.begin()

    def commit(self, path: Sequence[int], refeed: Callable[[int], None] | None = None) -> None:
        """Keep the rows `path` of the last forward (ascending; empty = none) and forget the rest; once per forward.

        Where a state cannot keep a part of them, the rows are fed again: by the layer's recorded call, or, where that
        is not possible, by `refeed`, which feeds so many rows to the whole model and is then committed as a whole.
        """
        fed, num_rows = self.span.num_rows, len(path)
        assert all(before < after for before, after in zip((-1, *path), (*path, fed), strict=True)), (path, self.span)
        assert is_prefix(path) or self.supports_trees, path
        for layer in self.layers:
            layer.commit(path)
        if 0 < num_rows < fed and not self._replay(num_rows):
            assert refeed is not None, "this state cannot keep a part of a forward by itself"
            for layer in self.layers:
                layer.commit(())  # also those that were fed again by themselves
            self.span.num_rows = 0
            refeed(num_rows)
        self.span.start += num_rows
        self.span.num_rows = 0

    def _replay(self, num_rows: int) -> bool:
        """Whether every state now holds the kept rows, fed again where need be."""
        lossy = [layer for layer in self.layers if not layer.keeps_prefixes]
        return all(isinstance(layer, RecurrentState) and layer.replay(num_rows) for layer in lossy)

    def arrays(self) -> list[mx.array]:
        """Everything that later forwards read."""
        return [one for layer in self.layers for one in layer.arrays()]

    def return_at_least(self, num_keys: int) -> None:
        """From now on return at least `num_keys` keys in exact mode (the probe's test)."""
        self.span.least_keys = num_keys

    def free(self) -> None:
        """Give the memory of all layers back and forget all tokens."""
        for layer in self.layers:
            layer.free()
        self.span.start = self.span.num_rows = self.span.least_keys = 0


def check_states(natives: Sequence[Any], model_name: str) -> None:
    """Refuse a model with a layer state that cannot be rolled back exactly.

    Raises:
        UnsupportedModel: names the first such layer and the class of its state.
    """
    for layer, native in enumerate(natives):
        for part in getattr(native, "caches", (native,)):
            name = type(part).__name__
            if name not in KINDS or getattr(part, "keep", None):
                raise UnsupportedModel(
                    f"layer {layer} of {model_name} keeps its state in a {name}, which this version cannot roll back "
                    f"losslessly on MLX; use a target whose layers keep one of {', '.join(KINDS)}, or --backend torch."
                )


def widest_window(natives: Sequence[Any]) -> int | None:
    """Tokens of the widest window among mlx-lm's caches of a model; None if there is none."""
    parts = [part for native in natives for part in getattr(native, "caches", (native,))]
    windows = [int(part.max_size) for part in parts if type(part).__name__ == "RotatingKVCache"]
    return max(windows, default=None)


def layer_kinds(natives: Sequence[Any], num_layers: int) -> list[str]:
    """mlx-lm's class of each layer's cache. Where some layers have none (Nemotron-H's feed-forward ones), mlx-lm's list
    does not say which, and every layer gets all the names."""
    names = [type(native).__name__ for native in natives]
    return names if len(names) == num_layers else [" or ".join(sorted(set(names)))] * num_layers
