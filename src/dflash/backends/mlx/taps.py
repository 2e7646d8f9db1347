"""Reading what decoder layers compute, without a change to mlx-lm's classes.

A watched layer gets a class of its own, derived from the one it has: calls go through it, everything else (parameters,
attributes, `isinstance`) stays as it was. Taking the last watcher off gives the layer its old class back. Other models,
and other instances of the same model, never see anything of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx

from dflash.backends.mlx.instances import reduced_as
from dflash.backends.mlx.states.recurrent import Call, RecurrentState


class LayerRecorder:
    """Keeps the outputs of tapped layers, and the calls of layers with a recurrent state, while it is recording.

    The layers stay watched until `close`; what is recorded belongs to the recording thread.
    """

    def __init__(self, layers: Sequence[Any], taps: Sequence[int], *, calls: bool) -> None:
        """
        Args:
            layers: all decoder layers.
            taps: indices of those whose outputs are kept, in this order.
            calls: keep the calls of layers with a recurrent state too, on that state.
        """
        self._local = threading.local()
        self._taps = tuple(taps)
        self._watched = {id(layer): (index, layer) for index, layer in enumerate(layers) if calls or index in taps}
        for _, layer in self._watched.values():
            _watch(layer, self)

    @contextmanager
    def recording(self) -> Iterator[list[mx.array]]:
        """Record this thread's forwards inside the block; afterwards the list holds one output per tap, in order."""
        outputs: list[mx.array] = []
        rows: dict[int, mx.array] = {}
        self._local.rows = rows
        try:
            yield outputs
            missing = [tap for tap in self._taps if tap not in rows]
            assert not missing, "close() was called, or a tapped layer did not run"
            outputs.extend(rows[tap] for tap in self._taps)
        finally:
            self._local.rows = None

    def called(self, layer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        """Told by a watched layer after each of its calls."""
        rows: dict[int, mx.array] | None = getattr(self._local, "rows", None)
        if rows is None:
            return
        index, _ = self._watched[id(layer)]
        if index in self._taps:
            rows[index] = output[0] if isinstance(output, tuple) else output  # some families return more
        states = [one for one in (*arguments, *keywords.values()) if isinstance(one, RecurrentState)]
        if states and arguments and isinstance(arguments[0], mx.array):
            states[0].call = Call(layer, arguments[0], arguments[1:], keywords)

    def close(self) -> None:
        """Leave the layers as they were found."""
        for _, layer in self._watched.values():
            _unwatch(layer, self)
        self._watched = {}


class _Watched:
    """Mixed into a layer's own class, for one instance."""

    dflash_watchers: list[LayerRecorder]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        output = super().__call__(*arguments, **keywords)  # type: ignore[misc]  # the layer's own
        for watcher in self.dflash_watchers:
            watcher.called(self, arguments, keywords, output)
        return output

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copy, stored or not, has the layer's own class."""
        return reduced_as(type(self).__mro__[2], cast("tuple[Any, ...]", super().__reduce_ex__(protocol)))


def _watch(layer: Any, watcher: LayerRecorder) -> None:
    kind = type(layer)
    if issubclass(kind, _Watched):
        kind.dflash_watchers.append(watcher)
    else:
        layer.__class__ = type(kind.__name__, (_Watched, kind), {"dflash_watchers": [watcher]})


def _unwatch(layer: Any, watcher: LayerRecorder) -> None:
    kind = type(layer)
    kind.dflash_watchers.remove(watcher)
    if not kind.dflash_watchers:
        layer.__class__ = kind.__mro__[2]  # behind the derived class and _Watched
