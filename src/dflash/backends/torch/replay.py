"""The fast way to take rejected rows out of recurrent layers: run only the recurrence again, on recorded inputs.

A recurrent state is a sum over all fed rows, so keeping some of them means starting again from the committed state. The
slow reference feeds the kept rows to the whole model. Here, while a forward verifies a block, the projections inside
each recurrent layer (most of its cost) are recorded; afterwards the layer runs once more on the kept rows, with every
projection answered from the record. What is computed again is the short convolution and the recurrence, by the model's
own code; nothing is known here about its formula, so gated delta rules, Kimi's and Mamba-2 take the same path.

Works on instances: the forwards of the projections are wrapped while a target is open and restored by `close`. What is
recorded belongs to one forward of one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dflash.backends.torch.compat import LayerSpec
from dflash.backends.torch.state import SessionCache
from dflash.backends.torch.states.recurrent import RecurrentState

_Forward = Callable[..., torch.Tensor]


@dataclass
class Record:
    """One forward of the recurrent layers."""

    inputs: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    """Layer -> arguments of its recurrent module."""
    outputs: dict[nn.Module, list[torch.Tensor]] = field(default_factory=dict)
    """Projection -> its outputs [1, rows, out], in the order of the calls."""


class Replay:
    """Records forwards of a model's recurrent layers and runs them again on fewer rows."""

    def __init__(self, model: nn.Module, specs: Sequence[LayerSpec]) -> None:
        self._local = threading.local()
        self._modules = _recurrent_modules(model, specs)
        self._handles = [self._attach(layer, module) for layer, module in self._modules.items()]
        self._wrapped: list[tuple[nn.Module, _Forward, _Forward | None]] = []
        """Projection, our forward, and what its instance had before."""
        for module in self._modules.values():
            for projection in filter(_is_projection, module.modules()):
                self._wrap(projection)

    def covers(self, cache: SessionCache) -> bool:
        """Whether every layer that cannot keep a part of the fed rows can be run again here."""
        layers = enumerate(cache.layers)
        return all(index in self._modules for index, layer in layers if not layer.keeps_prefixes)

    @contextmanager
    def recording(self) -> Iterator[Record]:
        """Record this thread's forward inside the block."""
        record = self._local.record = Record()
        try:
            yield record
        finally:
            self._local.record = None

    def run(self, record: Record, cache: SessionCache, num_kept: int) -> None:
        """Bring the recurrent states of `cache` to where only the first `num_kept` recorded rows were fed; commit these
        rows afterwards."""
        for layer, (args, kwargs) in record.inputs.items():
            state = cache.layers[layer]
            assert isinstance(state, RecurrentState)
            if state.keeps_prefixes:
                continue
            state.restart(num_kept)
            args = tuple(_first_rows(value, num_kept) if index == 0 else value for index, value in enumerate(args))
            if "hidden_states" in kwargs:
                kwargs = {**kwargs, "hidden_states": _first_rows(kwargs["hidden_states"], num_kept)}
            self._local.answers = {
                projection: [_first_rows(output, num_kept) for output in outputs]
                for projection, outputs in record.outputs.items()
            }
            try:
                self._modules[layer](*args, **kwargs)
            finally:
                self._local.answers = None

    def close(self) -> None:
        """Restore the model. A wrapper around ours stays, and ours then only passes calls on."""
        for handle in self._handles:
            handle.remove()
        for projection, ours, before in self._wrapped:
            if projection.__dict__.get("forward") is not ours:
                continue
            if before is None:
                del projection.__dict__["forward"]
            else:
                projection.__dict__["forward"] = before
        self._wrapped = []

    def _attach(self, layer: int, module: nn.Module) -> RemovableHandle:
        local = self._local

        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            running: Record | None = getattr(local, "record", None)
            if running is not None:
                running.inputs[layer] = (args, kwargs)

        return module.register_forward_pre_hook(record, with_kwargs=True)

    def _wrap(self, projection: nn.Module) -> None:
        local, original, before = self._local, projection.forward, projection.__dict__.get("forward")

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            answers: dict[nn.Module, list[torch.Tensor]] | None = getattr(local, "answers", None)
            if answers is not None:
                return answers[projection].pop(0)
            output: torch.Tensor = original(*args, **kwargs)
            running: Record | None = getattr(local, "record", None)
            if running is not None:
                running.outputs.setdefault(projection, []).append(output)
            return output

        self._wrapped.append((projection, forward, before))
        projection.__dict__["forward"] = forward


def _recurrent_modules(model: nn.Module, specs: Sequence[LayerSpec]) -> dict[int, nn.Module]:
    """Layer -> the module that holds its recurrence: the innermost one with the layer's number and a convolution."""
    found: dict[int, nn.Module] = {}
    for module in model.modules():  # outer modules come first
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or not 0 <= layer < len(specs) or not specs[layer].is_recurrent:
            continue
        if any(isinstance(child, nn.Conv1d) for child in module.modules()):
            found[layer] = module
    return found


def _is_projection(module: nn.Module) -> bool:
    """A linear layer, packed or quantised ones included."""
    return hasattr(module, "in_features") and hasattr(module, "out_features") and not list(module.children())


def _first_rows(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    return rows[:, :num_rows]
