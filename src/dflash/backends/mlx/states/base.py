"""What every kind of layer state has in common: where a forward writes, and what it must answer for.

The contract of a forward: `begin` is called with the span set; the model writes through the methods that mlx-lm's own
caches have; `commit(k)` keeps the first k of the fed rows, as if only these had ever been fed. Proposals are chains
here: mlx-lm's layers take their positions from one offset, so that rows of different branches could not stand at the
same place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

BUCKET = 128
"""In exact mode attention gets a multiple of this many keys, the unused ones masked (docs/exactness.md)."""


@dataclass(slots=True)
class Span:
    """Where the running forward writes; one object shared by all layers of a session."""

    start: int = 0
    """First row written = committed length = position of the anchor."""
    num_rows: int = 0
    """Rows fed, padding included."""
    in_buckets: bool = False
    """Whether the running forward gets whole buckets of keys."""
    least_keys: int = 0
    """Keys that are returned at least when whole buckets are (the probe's test)."""


class LayerState(ABC):
    """State of one layer. Subclasses store it; `commit` must leave it as if only the kept rows had been fed."""

    keeps_prefixes = True
    """Whether `commit` can keep a part of the fed rows; if not, it puts the state back to the start of the forward, and
    the kept rows are fed again."""

    rewinds = False
    """Whether committed rows can be taken back by moving the shared length alone."""

    span: Span

    @property
    def offset(self) -> int:
        """Position of the first row of the running forward, from which mlx-lm's layers count."""
        return self.span.start

    def begin(self) -> None:  # noqa: B027  # most kinds have nothing to do
        """Prepare the forward that `span` describes; the last one has been committed."""

    @abstractmethod
    def commit(self, num_rows: int) -> None:
        """Keep the first `num_rows` rows of the last forward. Called before the committed length moves."""

    @abstractmethod
    def free(self) -> None:
        """Give the memory back."""

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """What has to be evaluated so that the graph of earlier forwards can go."""

    @abstractmethod
    def committed(self) -> Sequence[mx.array]:
        """What a fresh run over the committed tokens would hold as well (oracles)."""
