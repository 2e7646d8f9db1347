"""Layers that hold a recurrent state and keys and values side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dflash.backends.torch.compat import LayerSpec
from dflash.backends.torch.states.base import Span
from dflash.backends.torch.states.full import FullKeyValueState
from dflash.backends.torch.states.recurrent import RecurrentState
from dflash.backends.torch.states.sliding import SlidingKeyValueState


class RecurrentAndFullState(RecurrentState, FullKeyValueState):
    """Both kinds in one; each half follows the rules of its own file."""

    keys_and_values: type[FullKeyValueState] = FullKeyValueState

    def __init__(self, span: Span, spec: LayerSpec) -> None:
        self.keys_and_values.__init__(self, span, spec)
        RecurrentState.__init__(self, span, spec)

    def begin(self) -> None:
        self.keys_and_values.begin(self)
        RecurrentState.begin(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        self.keys_and_values.lazy_initialization(self, *args, **kwargs)

    def reserve(self) -> None:
        self.keys_and_values.reserve(self)

    def commit(self, path: Sequence[int]) -> None:
        self.keys_and_values.commit(self, path)
        RecurrentState.commit(self, path)

    def free(self) -> None:
        self.keys_and_values.free(self)
        RecurrentState.free(self)

    def committed(self) -> list[torch.Tensor]:
        return [*self.keys_and_values.committed(self), *RecurrentState.committed(self)]


class RecurrentAndSlidingState(RecurrentAndFullState, SlidingKeyValueState):
    """As above over a window of keys and values."""

    is_sliding = True
    keys_and_values = SlidingKeyValueState
