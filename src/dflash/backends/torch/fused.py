"""Linear layers that read the same input, as one matmul: a draft's forward is a few rows through small layers, where
the number of kernels counts as much as their work.

Queries, keys and values of a block, gate and up of a feed-forward, keys and values of context rows for all layers. On
CPUs in float32 the joint weight is packed (packing.py), or held in float16 where that is as good (half.py). For
decoding only: a network that is being trained keeps its layers apart, and they are what the fused form is tested
against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dflash.backends.torch import half
from dflash.backends.torch.packing import KernelChoice, PackedLinear, is_packable


class FusedLinears:
    """Several linear layers over one input. No module, so that a network's names stay those of its checkpoint."""

    def __init__(self, parts: Sequence[nn.Linear], *, packs: bool, owns: bool = True) -> None:
        """
        Args:
            parts: of one input width, dtype and device, all with a bias or none.
            packs: run on a second copy of the weights where `packed` has one.
            owns: the layers' own weights become views of the joint one, so that nothing is held twice.
        """
        self._sizes = [part.out_features for part in parts]
        has_bias = parts[0].bias is not None
        joint = nn.Linear(parts[0].in_features, sum(self._sizes), bias=has_bias, device="meta")
        joint.weight = _joined([part.weight for part in parts])
        if has_bias:
            joint.bias = _joined([part.bias for part in parts])
        if owns:
            for part, weight in zip(parts, joint.weight.split(self._sizes), strict=True):
                part.weight = nn.Parameter(weight, requires_grad=False)
        self._linear = packed(joint) if packs else joint

    def __call__(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """[..., in] -> one [..., out] per layer, in their order."""
        parts: tuple[Tensor, ...] = self._linear(inputs).split(self._sizes, dim=-1)
        return parts


def packed(linear: nn.Linear) -> nn.Linear:
    """`linear` on packed weights, in float16 where that holds them, single rows too; its bits are compared with
    nobody's."""
    if half.holds(linear.weight):
        return half.HalfLinear(linear)
    return PackedLinear(linear, KernelChoice(packs_single=True)) if is_packable(linear.weight) else linear


def _joined(tensors: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([tensor.detach() for tensor in tensors]), requires_grad=False)
