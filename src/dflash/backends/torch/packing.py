"""Linear layers in the memory layout of oneDNN's kernels: float32 on CPUs, for the few rows of a decoding forward.

PyTorch's float32 matmul re-packs the weights on every call with several rows and sums 1, 2, 3 or more rows in orders of
their own. oneDNN with weights packed once does neither: a 1536 x 576 layer on 4 rows takes 139 instead of 202 us (Zen
3, one thread), and a row's bits do not depend on the number of rows, so that exact plain decoding needs no padding of
its forwards (exactness.py). It costs some 20 us per call, so that a single row that need not be exact may be slower or
faster on it, depending on processor, threads and layer sizes: plain_form.py measures that at load. It is no faster for
the many rows of a prefill. These keep PyTorch's matmul, and the embedding shares the plain weights, so both copies stay
in memory; `pack_linears` therefore leaves models alone whose second copy would be large.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from dflash.backends.torch.memory import available_bytes

logger = logging.getLogger(__name__)

ROWS_HINT = 8
"""Rows that the layout is chosen for. Measured: 8, 32 and 512 give the same layout, 1 one that is slower for more."""
MOST_ROWS = 64
"""Forwards of more rows use the plain weights. Measured: equal at 32 rows, packed 10 % slower at 512."""

MOST_BYTES = 4 * 2**30
"""Larger models are left alone: their packed copies would double a large memory."""
MOST_SHARE = 0.25
"""Share of the memory available at load that packed copies may take; the rest is for keys, values and neighbours."""
MOST_UNSEEN_BYTES = 2**30
"""Packed copies where the system does not say what is available (no Linux). Target and draft are asked for one by one,
and there the second question does not see the first one's copies: both together stay modest."""


class KernelChoice(threading.local):
    """What the running forward of this thread wants; shared by the packed layers of a model.

    `packs_single`: single rows run on the packed weights as several rows do, for exactness or because it is faster.
    """

    def __init__(self, *, packs_single: bool = False) -> None:
        """What holds in a thread that has not chosen."""
        self._unless_chosen = self.packs_single = packs_single

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is one in which no thread has chosen yet."""
        return functools.partial(KernelChoice, packs_single=self._unless_chosen), ()


class PackedWeight:
    """Weights over one input, joined in oneDNN's layout. That layout can neither be copied nor stored, so a copy packs
    its own weights again, which gives the same bits."""

    def __init__(self, *weights: Tensor) -> None:
        """`weights`: [out, in] each."""
        self._weights = weights
        plain = [weight.detach() for weight in weights]
        joint = plain[0] if len(plain) == 1 else torch.cat(plain)
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(joint, ROWS_HINT)

    def __call__(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """[..., in] -> [..., sum of out]."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise.default(inputs, self._packed, bias, "none", [], "")
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedWeight, self._weights


class PackedLinear(nn.Linear):
    """`nn.Linear` with a second copy of its weight in oneDNN's layout."""

    def __init__(self, linear: nn.Linear, choice: KernelChoice) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.choice = choice
        self._packed = self._pack()

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        num_rows = inputs.numel() // self.in_features
        single = num_rows == 1 and not self.choice.packs_single
        if single or num_rows > MOST_ROWS or torch.is_grad_enabled():  # the packed weight has no gradient
            return nn.functional.linear(inputs, self.weight, self.bias)
        return self._run_packed(inputs)

    def _pack(self) -> PackedWeight | None:
        return PackedWeight(self.weight)

    def _run_packed(self, inputs: Tensor) -> Tensor:
        assert self._packed is not None
        return self._packed(inputs, self.bias)


class Place(NamedTuple):
    """Where a model keeps a linear layer."""

    parent: nn.Module
    name: str
    linear: nn.Linear


def can_pack() -> bool:
    """Whether this build of PyTorch has oneDNN and the two operators that we use (they are not public API)."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


def pack_linears(model: nn.Module, *, choice: KernelChoice | None = None, available: int | None = None) -> int:
    """Replace the linear layers of `model` by packed ones where that is known to pay: float32, on a CPU.

    Other devices and dtypes, subclasses of `nn.Linear` (quantised, adapters), weights of a tensor class of their own
    (torchao's quantised ones, which call themselves float32) and PyTorch builds without oneDNN are left as they are.
    Names, weights and state dict of the model stay the same; changing a weight afterwards leaves its packed copy stale.
    Costs the memory of these weights once more, and so is not done where `has_room` says no: such models decode as
    well, with padded forwards in exact mode.

    Args:
        choice: what its layers ask; None = one of the model's own, which says no until a forward says otherwise.
        available: bytes of memory that may still be used; None = ask the system.

    Returns:
        Number of layers replaced.
    """
    found = packable_places(model)
    if not has_room([place.linear.weight for place in found], available=available):
        return 0
    pack_places(found, choice or kernel_choice(model) or KernelChoice())
    return len(found)


def packable_places(model: nn.Module) -> list[Place]:
    """The linear layers of `model` that packing can pay for."""
    return [
        Place(parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_bare(child) and is_packable(child.weight)
    ]


def pack_places(places: Sequence[Place], choice: KernelChoice) -> None:
    """Put packed layers where these linear ones are."""
    for parent, name, linear in places:
        parent.register_module(name, PackedLinear(linear, choice))


def is_bare(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether this is a linear layer and nothing more: hooks or a forward that another library put on the instance
    would be lost with it."""
    return type(module) is nn.Linear and not (
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    )


def is_packable(weight: Tensor) -> bool:
    """Whether packing this weight can pay."""
    plain = type(weight.data) is Tensor and weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and can_pack()


def has_room(weights: Sequence[Tensor], *, available: int | None = None) -> bool:
    """Whether second copies of these weights fit into what packing may take. `available`: bytes; None = ask."""
    needed = sum(weight.nbytes for weight in weights if is_packable(weight))
    available = available_bytes() if available is None else available
    if needed <= (MOST_UNSEEN_BYTES if available is None else min(MOST_BYTES, MOST_SHARE * available)):
        return True
    logger.info("weights are not packed: their second copy would take %.1f GiB", needed / 2**30)
    return False


def kernel_choice(model: nn.Module) -> KernelChoice | None:
    """The object by which a forward of a packed model says what it wants; None if nothing is packed."""
    return next((module.choice for module in model.modules() if isinstance(module, PackedLinear)), None)
