"""A layer with several states side by side (attention and Mamba, or an indexer's keys beside those of attention)."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dflash.backends.mlx.states.base import LayerState, Span


class HybridState(LayerState):
    """Stands for mlx-lm's CacheList: its models take the parts by index."""

    def __init__(self, span: Span, parts: Sequence[LayerState]) -> None:
        self.span = span
        self.parts = tuple(parts)
        self.keeps_prefixes = all(part.keeps_prefixes for part in parts)
        self.supports_trees = all(part.supports_trees for part in parts)
        self.rewinds = all(part.rewinds for part in parts)

    def __getitem__(self, index: int) -> LayerState:
        return self.parts[index]

    def begin(self) -> None:
        for part in self.parts:
            part.begin()

    def commit(self, path: Sequence[int]) -> None:
        for part in self.parts:
            part.commit(path)

    def free(self) -> None:
        for part in self.parts:
            part.free()

    def arrays(self) -> list[mx.array]:
        return [one for part in self.parts for one in part.arrays()]

    def committed(self) -> Sequence[mx.array]:
        return [one for part in self.parts for one in part.committed()]
