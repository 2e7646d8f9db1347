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

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dflash.backends.torch.compat import LayerSpec
from dflash.backends.torch.state import SessionCache
from dflash.backends.torch.states.recurrent import RecurrentState

_Forward = Callable[..., Any]
"""Returns a tensor, or a tuple with one in front."""


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
        self._wrapped: list[tuple[nn.Module, _Forward, _Forward | None]] = []
        """Module, our forward, and what its instance had before."""
        for layer, module in self._modules.items():
            for projection in filter(_is_projection, module.modules()):
                self._wrap(projection, _Projection(projection, self._local))
            self._wrap(module, _Recurrence(layer, module, self._recur))

    def covers(self, cache: SessionCache) -> bool:
        """Whether every layer that cannot keep a part of the fed rows can be run again here."""
        layers = enumerate(cache.layers)
        return all(index in self._modules for index, layer in layers if not layer.keeps_prefixes)

    @contextmanager
    def recording(self, rows_alone: int = 0) -> Iterator[Record]:
        """Record this thread's forward inside the block. With `rows_alone` the first so many rows take the recurrences
        one by one, as plain steps do: exact mode, in which a row's bits must not depend on the block around it. The
        states then hold what they were after each row, and nothing need run again."""
        record = self._local.record = Record()
        self._local.rows_alone = rows_alone
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
            self._local.answers = {
                projection: [_first_rows(output, num_kept) for output in outputs]
                for projection, outputs in record.outputs.items()
            }
            try:
                self._modules[layer](*_of_rows(args, 0, num_kept), **_of_rows(kwargs, 0, num_kept))
            finally:
                self._local.answers = None

    def close(self) -> None:
        """Restore the model. A wrapper around ours stays, and ours then only passes calls on."""
        for module, ours, before in reversed(self._wrapped):
            if module.__dict__.get("forward") is not ours:
                continue
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before
        self._wrapped = []

    def _wrap(self, module: nn.Module, forward: _Forward) -> None:
        self._wrapped.append((module, forward, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    def _recur(self, forward: _Recurrence, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a recurrent module and record its arguments."""
        local, layer, original = self._local, forward.layer, forward.original
        running: Record | None = getattr(local, "record", None)
        if running is None:
            return original(*args, **kwargs)
        running.inputs[layer] = (args, kwargs)
        before = set(running.outputs)
        returned: Any = original(*args, **kwargs)
        block = returned[0] if isinstance(returned, tuple) else returned  # some modules return their state as well
        outputs = {module: rows for module, rows in running.outputs.items() if module not in before}
        last = next((module for module, rows in outputs.items() if rows[-1] is block), None)
        if not local.rows_alone or last is None or block.shape[1] == 1:
            return returned
        block = self._row_by_row(layer, original, (args, kwargs), outputs, last)
        return (block, *returned[1:]) if isinstance(returned, tuple) else block

    def _row_by_row(
        self,
        layer: int,
        original: _Forward,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        outputs: dict[nn.Module, list[torch.Tensor]],
        last: nn.Module,
    ) -> torch.Tensor:
        """The module's output [1, rows, H] with the recurrence run for one row at a time, all projections in one go:
        the recorded ones, and in the end `last` on what the rows would have given it."""
        local, (args, kwargs) = self._local, arguments
        cache = next(value for value in (*args, *kwargs.values()) if isinstance(value, SessionCache))
        state = cache.layers[layer]
        assert isinstance(state, RecurrentState)
        num_rows = outputs[last][-1].shape[1]
        record, local.record = local.record, None
        local.last, local.last_inputs = last, []
        try:
            with state.rows_alone():
                for row in range(min(local.rows_alone, num_rows)):
                    state.restart(1)
                    local.answers = {
                        module: [one[:, row : row + 1] for one in calls] for module, calls in outputs.items()
                    }
                    original(*_of_rows(args, row, row + 1), **_of_rows(kwargs, row, row + 1))
                    state.keep_row()
            local.answers = None
            inputs = local.last_inputs + local.last_inputs[-1:] * (num_rows - len(local.last_inputs))
            output: torch.Tensor = last(torch.cat(inputs, dim=1))
            return output
        finally:
            local.answers = local.last = None
            local.record = record


class _Wrapper:
    """A forward of ours on an instance. A copy of the instance, stored or not, gets the forward that ours stands in
    for: it belongs to no target."""

    def __init__(self, original: _Forward) -> None:
        self.original = original

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_was, (self.original,)


class _Projection(_Wrapper):
    """Records the outputs of a projection, or answers from a record."""

    def __init__(self, projection: nn.Module, local: threading.local) -> None:
        super().__init__(projection.forward)
        self._projection, self._local = projection, local

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        local = self._local
        answers: dict[nn.Module, list[torch.Tensor]] | None = getattr(local, "answers", None)
        if answers is not None:
            if self._projection is getattr(local, "last", None):
                local.last_inputs.append(args[0])
            return answers[self._projection].pop(0)
        output: torch.Tensor = self.original(*args, **kwargs)
        running: Record | None = getattr(local, "record", None)
        if running is not None:
            running.outputs.setdefault(self._projection, []).append(output)
        return output


class _Recurrence(_Wrapper):
    """Records the arguments of a recurrent module."""

    def __init__(self, layer: int, module: nn.Module, run: Callable[[_Recurrence, Any, Any], Any]) -> None:
        super().__init__(module.forward)
        self.layer, self._run = layer, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, args, kwargs)


def _as_it_was(forward: _Forward) -> _Forward:
    """What a copied wrapper becomes; a bound method is by then one of the copied module."""
    return forward


def _of_rows(values: Any, first: int, end: int) -> Any:
    """Arguments of a recurrent module for some of its rows: the hidden states come first or by name."""
    if isinstance(values, dict):
        return {key: value[:, first:end] if key == "hidden_states" else value for key, value in values.items()}
    return tuple(value[:, first:end] if index == 0 else value for index, value in enumerate(values))


def _recurrent_modules(model: nn.Module, specs: Sequence[LayerSpec]) -> dict[int, nn.Module]:
    """Layer -> the module that holds its recurrence: the innermost one with the layer's number and a convolution, or
    where no module of the layer convolves, the innermost one that is given the cache. Its class says so: the signature
    of an instance that another target or program has wrapped tells nothing."""
    convolving: dict[int, nn.Module] = {}
    cached: dict[int, nn.Module] = {}
    for module in model.modules():  # outer modules come first
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or not 0 <= layer < len(specs) or not specs[layer].is_recurrent:
            continue
        if any(isinstance(child, nn.Conv1d) for child in module.modules()):
            convolving[layer] = module
        elif {"cache", "past_key_values"} & set(inspect.signature(type(module).forward).parameters):
            cached[layer] = module
    return cached | convolving


def _is_projection(module: nn.Module) -> bool:
    """A linear layer, packed or quantised ones included."""
    return hasattr(module, "in_features") and hasattr(module, "out_features") and not list(module.children())


def _first_rows(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    return rows[:, :num_rows]
