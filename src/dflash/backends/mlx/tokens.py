"""Draft tokens that are still being computed: their number is known, their values are read when they are asked for.

The target's forward takes them as an array, so that a round has one wait for the device, where the acceptor reads the
target's own tokens; by then these are there as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import mlx.core as mx


class DeviceTokens(Sequence[int]):
    """Token ids [T] on the device."""

    def __init__(self, array: mx.array) -> None:
        self.array = array
        self._values: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return int(self.array.shape[0])

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if self._values is None:
            values: Any = self.array.tolist()
            self._values = tuple(values)
        return self._values[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))
