"""Taps: the outputs of some decoder layers, recorded while a forward of ours runs.

Knows where a model keeps its layers and what their outputs look like; does not know what reads the features.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from dflash.errors import UnsupportedModel


class TapRecorder:
    """Keeps the outputs of some decoder layers while it is recording; its hooks do nothing otherwise.

    The hooks stay on the layers until `close`: adding and removing them per forward would race with another thread that
    runs the same model. What is recorded belongs to the recording thread.
    """

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self._local = threading.local()
        self._handles = [layer.register_forward_hook(_Tap(slot, self._local)) for slot, layer in enumerate(layers)]

    @contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """Record this thread's forwards inside the block; afterwards the list holds one output per layer, in order."""
        outputs: list[torch.Tensor] = []
        rows: dict[int, torch.Tensor] = {}
        self._local.rows = rows
        try:
            yield outputs
            assert len(rows) == len(self._handles), "close() was called, or a tapped layer did not run"
            outputs.extend(rows[slot] for slot in range(len(rows)))
        finally:
            self._local.rows = None

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class _Tap:
    """The hook on one tapped layer."""

    def __init__(self, slot: int, local: threading.local) -> None:
        self._slot, self._local = slot, local

    def __call__(
        self, module: torch.nn.Module, inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> None:
        rows: dict[int, torch.Tensor] | None = getattr(self._local, "rows", None)
        if rows is None:
            return
        hidden = output[0] if isinstance(output, tuple) else output  # some families return tuples
        if hidden.ndim != 3:
            raise UnsupportedModel(
                f"{type(module).__name__} returns {hidden.ndim - 2} streams of hidden states, not one, so that a "
                "draft cannot read it; use this target without a draft."
            )
        rows[self._slot] = hidden

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied layer, stored or not, has a hook that nobody records by."""
        return _idle_tap, (self._slot,)


def _idle_tap(slot: int) -> _Tap:
    return _Tap(slot, threading.local())


def concatenate(rows: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Tap outputs, each [1, rows, H] on its layer's device, side by side on `device` as [rows, taps x H]."""
    if len(rows) == 1:
        return rows[0][0].to(device)
    return torch.cat([row[0].to(device) for row in rows], dim=-1)


def tapped_layers(model: PreTrainedModel, taps: Sequence[int], num_layers: int) -> list[torch.nn.Module]:
    """Decoder layers with the ids `taps`.

    Raises:
        UnsupportedModel: the decoder does not keep its layers in a list called `layers`.
    """
    if not taps:
        return []
    decoder: torch.nn.Module = model.get_decoder()
    for module in decoder.modules():  # some decoders are wrapped once more
        layers = getattr(module, "layers", None)
        if isinstance(layers, torch.nn.ModuleList) and len(layers) == num_layers:
            return [layers[tap] for tap in taps]
    raise UnsupportedModel(
        f"the decoder of {type(model).__name__} has no list `layers` to tap; this version cannot use a draft with it."
    )
