"""How many processes share a run: the one place that knows there is a single one yet.

The trainer divides an optimizer step's sequences with `share`, adds gradients and sums with `total`, and locks the
run's folder and writes files where `is_main` holds. Data-parallel training is another class with these three
members, over `torch.distributed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class Processes(Protocol):
    """The processes of one run, seen from one of them."""

    @property
    def is_main(self) -> bool:
        """Whether this process holds the folder, writes checkpoints, metrics and the draft, and evaluates."""
        ...

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """The part of an optimizer step's sequences that this process works on."""
        ...

    def total(self, values: Sequence[Tensor]) -> None:
        """Add up each tensor over all processes, in place. All of them lie on the device of the run."""
        ...


class SingleProcess:
    """A run in one process; implements `Processes`."""

    @property
    def is_main(self) -> bool:
        """It is."""
        return True

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Everything."""
        return items

    def total(self, values: Sequence[Tensor]) -> None:
        """Nothing to add."""
