"""Positions of the rows of a tree, given to models that count from one offset per forward.

mlx-lm's attention layers hand the offset of their cache to a rotary embedding. For a tree the cache gives an object in
its place, which nothing but a watched rotary embedding can use; that one turns every row by its own position, as a
batch of single rows. Whatever else a model does with the object fails while its graph is built, so that a model whose
layers count by other means is found out before a tree is fed (`target.py`). As in taps.py, watched embeddings get a
class of their own and their old one back; no class is patched, and other instances never see anything of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import mlx.core as mx

from dflash.backends.mlx.instances import reduced_as


class RowPositions:
    """Stands for the offset of a forward whose rows do not follow each other."""

    def __init__(self, rows: Sequence[int], *, counted_on: bool = False) -> None:
        """`rows`: position of each row fed. `counted_on`: the model adds the array that it makes of this object to
        0, 1, ... and takes the sums for the rows' positions; so the array is what makes them that."""
        self.rows = mx.array(list(rows), dtype=mx.int32)
        self._counted_on = counted_on
        self.was_copied = False
        """Whether the positions left this object: as an array they could be used for anything."""

    def __mlx_array__(self) -> mx.array:
        self.was_copied = True
        return self.rows - mx.arange(len(self.rows)) if self._counted_on else self.rows

    def _no_number(self, *_: object) -> NoReturn:
        raise TypeError("positions are no number")

    __bool__ = __index__ = __int__ = __float__ = __eq__ = __ne__ = _no_number
    __hash__ = None  # type: ignore[assignment]


class RowRopes:
    """Rotary embeddings that take a position per row, until `close`."""

    def __init__(self, ropes: Sequence[Any]) -> None:
        """`ropes`: the embeddings of a model, called with [1, ..., rows, dim] and `offset`."""
        self._ropes = list(ropes)
        for rope in self._ropes:
            _watch(rope)

    def close(self) -> None:
        """Leave the embeddings as they were found."""
        for rope in self._ropes:
            _unwatch(rope)
        self._ropes = []


class _ByRow:
    """Mixed into an embedding's own class, for one instance."""

    dflash_users: int

    def __call__(self, x: mx.array, offset: Any = 0, *arguments: Any, **keywords: Any) -> mx.array:
        rows = _rows(x, offset)
        if rows is None:
            own: mx.array = super().__call__(x, offset, *arguments, **keywords)  # type: ignore[misc]  # the embedding's
            return own
        turned: mx.array = super().__call__(x.swapaxes(0, -2), rows, *arguments, **keywords)  # type: ignore[misc]
        return turned.swapaxes(0, -2)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copy, stored or not, has the embedding's own class."""
        return reduced_as(type(self).__mro__[2], cast("tuple[Any, ...]", super().__reduce_ex__(protocol)))


def _rows(x: mx.array, offset: Any) -> mx.array | None:
    """Positions [rows] where each row has its own; also as a plain array, which is one per batch row elsewhere."""
    if isinstance(offset, RowPositions):
        return offset.rows
    is_vector = isinstance(offset, mx.array) and offset.ndim == 1
    return offset if is_vector and x.shape[0] == 1 < x.shape[-2] == offset.shape[0] else None


def _watch(rope: Any) -> None:
    kind = type(rope)
    if issubclass(kind, _ByRow):
        kind.dflash_users += 1
    else:
        rope.__class__ = type(kind.__name__, (_ByRow, kind), {"dflash_users": 1})


def _unwatch(rope: Any) -> None:
    kind = type(rope)
    kind.dflash_users -= 1
    if not kind.dflash_users:
        rope.__class__ = kind.__mro__[2]  # behind the derived class and _ByRow
