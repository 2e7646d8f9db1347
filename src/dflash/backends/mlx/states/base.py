"""What every kind of layer state has in common: where a forward writes, and what it must answer for.

The contract of a forward: `begin` is called with the span set; the model writes through the methods that mlx-lm's own
caches have; `commit(path)` keeps some of the fed rows, as if only these had ever been fed: of a chain the first ones,
of a tree those from the root to a node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from dflash.backends.mlx.positions import RowPositions
from dflash.core.key_lengths import BUCKETS, KeyLengths
from dflash.types import Proposal

BUCKET = 128
"""Storage grows in whole buckets of so many keys."""


@dataclass(slots=True)
class Span:
    """Where the running forward writes; one object shared by all layers of a session."""

    start: int = 0
    """First row written = committed length = position of the anchor."""
    num_rows: int = 0
    """Rows fed, padding included."""
    exact: bool = False
    """Whether the running forward gets one of `lengths`, the unused keys masked."""
    lengths: KeyLengths = BUCKETS
    """Numbers of keys that attention gets in exact mode, all multiples of the bucket."""
    tree: Proposal | None = None
    """What the running forward feeds, if that is a tree."""
    positions: RowPositions | None = None
    """Of a tree's rows, padding included."""
    least_keys: int = 0
    """Keys that are returned at least in exact mode (the probe's test)."""


class LayerState(ABC):
    """State of one layer. Subclasses store it; `commit` must leave it as if only the kept rows had been fed."""

    supports_trees = False
    """Whether rows of one forward may belong to different branches: `commit` then takes paths that are no prefix."""

    keeps_prefixes = True
    """Whether `commit` can keep a part of the fed rows; if not, it puts the state back to the start of the forward, and
    the kept rows are fed again."""

    rewinds = False
    """Whether committed rows can be taken back by moving the shared length alone."""

    span: Span

    @property
    def offset(self) -> int | RowPositions:
        """Position of the first row of the running forward, from which mlx-lm's layers count; of a tree those of all
        rows."""
        return self.span.start if self.span.positions is None else self.span.positions

    def begin(self) -> None:  # noqa: B027  # most kinds have nothing to do
        """Prepare the forward that `span` describes; the last one has been committed."""

    @abstractmethod
    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows `path` of the last forward (ascending), as if only these had been fed. Called before the
        committed length moves."""

    @abstractmethod
    def free(self) -> None:
        """Give the memory back."""

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """What has to be evaluated so that the graph of earlier forwards can go."""

    @abstractmethod
    def committed(self) -> Sequence[mx.array]:
        """What a fresh run over the committed tokens would hold as well (oracles)."""
