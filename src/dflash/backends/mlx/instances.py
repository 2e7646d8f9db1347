"""Copies of instances that have a class of their own for a while (taps.py, positions.py): they get the one before.

A class that is made for an instance can be found by nobody who reads a stored copy, and what watches the instance knows
nothing of its copies.
"""

from __future__ import annotations

from typing import Any


def reduced_as(kind: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `__reduce_ex__` says of an instance, for a copy of class `kind`."""
    _, (_, *arguments), *state = reduced
    return _made, (kind, *arguments), *state


def _made(kind: type, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)
