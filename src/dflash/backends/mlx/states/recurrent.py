"""State that sums up all tokens (gated delta rule, Mamba, short convolutions): nothing in it can be cropped.

The arrays at the start of a forward are kept (no layer changes them in place, so that costs no copy). If only a part of
the fed rows is kept, the state goes back to them, and the kept rows are fed again: by the whole model (`target.py`,
the reference), or only through this layer, whose call was recorded (`replay`). Evaluation being lazy, a layer that is
called again computes just what its state needs: no output projection, no feed-forward network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from dflash.backends.mlx.states.base import LayerState, Span


@dataclass(frozen=True)
class Call:
    """A decoder layer's call in the running forward."""

    layer: Callable[..., Any]
    inputs: mx.array  # [1, rows, H]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @property
    def can_be_cut(self) -> bool:
        """Whether the first rows alone give the same: nothing else in the call has a row's axis."""
        others = (*self.arguments, *self.keywords.values())
        return not any(isinstance(one, mx.array | list | tuple | dict) for one in others)

    def repeat(self, num_rows: int) -> None:
        """Call the layer with the first rows, for what it does to its state."""
        self.layer(self.inputs[:, :num_rows], *self.arguments, **self.keywords)


class RecurrentState(ArraysCache, LayerState):
    """mlx-lm's ArraysCache (some of its models ask for that class) with a way back."""

    keeps_prefixes = False
    cache: list[Any]

    def __init__(self, span: Span, size: int) -> None:
        super().__init__(size)
        self.span = span
        self.call: Call | None = None
        self._before: list[mx.array | None] = [None] * size

    def begin(self) -> None:
        self._before = list(self.cache)
        self.call = None

    def commit(self, path: Sequence[int]) -> None:
        if len(path) != self.span.num_rows:
            self.cache = list(self._before)

    def replay(self, num_rows: int) -> bool:
        """Take the first `num_rows` rows of the last forward in again, behind `commit`; False if that is not possible
        with this layer."""
        if self.call is None or not self.call.can_be_cut:
            return False
        self.call.repeat(num_rows)
        return True

    def free(self) -> None:
        self.cache = [None] * len(self.cache)
        self._before = list(self.cache)
        self.call = None

    def arrays(self) -> list[mx.array]:
        return [one for one in self.cache if one is not None]

    def committed(self) -> Sequence[mx.array]:
        return self.arrays()
