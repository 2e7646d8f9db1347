"""Linear layers of a model that read the same input, as one packed matmul.

Queries, keys and values, gate and up: a decoding forward has few rows, so that each small matmul costs more than its
work, and one of their joint width is cheaper (8 rows through SmolLM2's layers: 44 ms apart, 32 ms joined). The model's
code stays as it is and calls its layers one by one; whichever is called first computes all, the others are handed
their share. Which layers belong together is seen in a forward: children of one module that got the very same tensor.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash.backends.torch.packing import (
    KernelChoice,
    PackedLinear,
    PackedWeight,
    has_room,
    kernel_choice,
    pack_places,
    packable_places,
)

logger = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Largest difference of logits, relative to their largest value, that other summation orders are allowed."""
HIDDEN = 1e30
"""Logits beyond this are no numbers to compare."""
REFUSALS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, NameError, ImportError)
"""What a foreign model's code may raise when its layers give shares."""
NUM_ROWS = 3
"""Of the forward in which layers are watched; a bare row may take another path."""


Siblings = tuple[nn.Module, list[tuple[str, nn.Linear]]]
"""A module and those of its children, by name, that read one tensor."""


class _Shares(threading.local):
    """What a thread's running forward has computed and not given out: two threads may decode on one model."""

    held: tuple[Tensor, dict[int, Tensor]] | None = None
    """The input, and rows by part."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Shares, ()


class Joint:
    """The packed weights of several layers over one input."""

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        """`parts`: of one input width; all with a bias or none."""
        self._sizes = [part.out_features for part in parts]
        self._packed = PackedWeight(*(part.weight for part in parts))
        has_bias = parts[0].bias is not None
        self._bias = torch.cat([part.bias.detach() for part in parts]) if has_bias else None
        self._local = _Shares()

    def share(self, inputs: Tensor, number: int) -> Tensor:
        """[..., out] of part `number`. All are computed for the first that asks; each share is given out once, so that
        the next forward computes anew even if it feeds the same tensor."""
        held = self._local.held
        if held is None or held[0] is not inputs or number not in held[1]:
            rows = self._packed(inputs, self._bias)
            held = inputs, dict(enumerate(rows.split(self._sizes, dim=-1)))
        share = held[1].pop(number)
        self._local.held = held if held[1] else None
        return share


class JoinedLinear(PackedLinear):
    """`nn.Linear` whose rows come from a `Joint` wherever a packed layer would run packed."""

    def __init__(self, linear: nn.Linear, choice: KernelChoice, joint: Joint, number: int) -> None:
        super().__init__(linear, choice)
        self._joint, self._number = joint, number

    def _pack(self) -> None:
        """The joint holds the packed weights."""

    def _run_packed(self, inputs: Tensor) -> Tensor:
        return self._joint.share(inputs, self._number)


def join_and_pack(model: PreTrainedModel, *, available: int | None = None) -> int:
    """Join the linear layers of `model` that read the same input, and pack all as `pack_linears` does.

    A short forward before and after must give the same logits, else nothing is joined: a model may do to a layer's
    output what a share of a joint one does not allow.

    Returns:
        Number of layers that run packed, joined or alone.
    """
    places = packable_places(model)
    linears = list(dict.fromkeys(place.linear for place in places))
    if not linears or not has_room([linear.weight for linear in linears], available=available):
        return 0
    choice = kernel_choice(model) or KernelChoice()
    groups: list[Siblings] = []
    try:
        with _watched(linears) as seen:
            expected = _logits(model)
        groups = _siblings(model, seen)
        for parent, children in groups:
            joint = Joint([child for _, child in children])
            for number, (name, child) in enumerate(children):
                parent.register_module(name, JoinedLinear(child, choice, joint, number))
        if not _alike(_logits(model), expected):
            raise ValueError("other logits")
    except REFUSALS as error:  # it decodes as well without
        logger.info("layers of %s are not joined: %s", type(model).__name__, error)
        for parent, children in groups:  # the very layers that were there
            for name, child in children:
                parent.register_module(name, child)
    # Places whose layer is still there; the others are joined.
    pack_places([place for place in places if getattr(place.parent, place.name) is place.linear], choice)
    return len(places)


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Whether logits differ by rounding only; a model may hide tokens behind the least number there is."""
    shown = expected.abs() < HIDDEN
    if not torch.equal(found[~shown], expected[~shown]):
        return False
    found, expected = found[shown], expected[shown]
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())  # of NaN nothing is true


@contextmanager
def _watched(linears: Sequence[nn.Linear]) -> Iterator[list[tuple[nn.Linear, Tensor]]]:
    """(layer, its input) in the order in which they run; inputs are kept, so that no two share an address."""
    seen: list[tuple[nn.Linear, Tensor]] = []

    def saw(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Linear)
        seen.append((module, inputs[0]))

    handles = [linear.register_forward_pre_hook(saw) for linear in linears]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _siblings(model: PreTrainedModel, seen: Sequence[tuple[nn.Linear, Tensor]]) -> list[Siblings]:
    """Groups of two or more. A layer that ran twice is in none."""
    input_of: dict[nn.Linear, Tensor] = {}
    repeated = set()
    for linear, tensor in seen:
        if linear in input_of:
            repeated.add(linear)
        input_of[linear] = tensor
    groups: list[Siblings] = []
    for parent in model.modules():
        by_input: dict[tuple[int, bool], list[tuple[str, nn.Linear]]] = {}
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and child in input_of and child not in repeated:
                by_input.setdefault((id(input_of[child]), child.bias is None), []).append((name, child))
        groups += [(parent, children) for children in by_input.values() if len(children) > 1]
    return groups


@torch.inference_mode()
def _logits(model: PreTrainedModel) -> Tensor:
    ids = torch.arange(1, 1 + NUM_ROWS, device=model.device)[None]
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits
