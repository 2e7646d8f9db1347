"""Layers that store nothing: they read another layer's keys and values (Gemma 3n, Gemma 4) or do not attend at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash.backends.torch.states.base import LayerState


class NoState(LayerState):
    """Nothing to keep, nothing to roll back. What such a layer reads is rolled back where it is stored."""

    supports_trees = True
    rewinds = True
    is_sliding = False
    is_compileable = True
    is_croppable = True
    supports_early_init = False
    is_initialized = True
    keys = None
    values = None

    def commit(self, path: Sequence[int]) -> None:
        pass

    def free(self) -> None:
        pass

    def committed(self) -> list[torch.Tensor]:
        return []
