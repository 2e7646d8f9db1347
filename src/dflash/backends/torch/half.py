"""Linear layers of a draft with weights in float16 and everything else in float32, on CPUs.

Reading its weights is most of what a draft's forward does. Drafts are published in bfloat16, and float16 holds those
numbers as well (more bits of mantissa; a range that weights do not leave), so half the bytes give the same products.
FBGEMM multiplies them with float32 rows and sums in float32: 8 rows through layers of SmolLM2's sizes take 26, not
40 ms. Not for targets: their bits are compared, and one that came in more than bfloat16 would be another model.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from dflash.backends.torch.packing import MOST_ROWS

LEAST_STEP = 2.0**-24
"""Between the smallest numbers of float16: what bfloat16's tiny ones are rounded to."""
ROUNDING = 2.0**-12
"""Share of a layer's largest weight that this may be: what bfloat16 rounds away is sixteen times as much."""


class HalfLinear(nn.Linear):
    """`nn.Linear` with a second copy of its weight in float16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._half = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), linear.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if inputs.numel() > MOST_ROWS * self.in_features or torch.is_grad_enabled():
            return nn.functional.linear(inputs, self.weight, self.bias)
        output: Tensor = torch.ops.quantized.linear_dynamic_fp16(inputs, self._half)
        return output


def holds(weight: Tensor) -> bool:
    """Whether float16 holds this float32 weight as exactly as bfloat16 can tell, on a CPU that can multiply it."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not can_multiply():
        return False
    weight = weight.detach()
    largest = float(weight.abs().max())
    return bool((weight.half().float() - weight).abs().max() <= min(LEAST_STEP, ROUNDING * largest))


@cache
def can_multiply() -> bool:
    """Whether this build of PyTorch on this processor has the operators, which are not public API."""
    try:
        plain = nn.Linear(16, 16, bias=False, device="meta")
        plain.weight = nn.Parameter(torch.full((16, 16), 0.5, device="cpu"), requires_grad=False)
        with torch.inference_mode():
            return bool((HalfLinear(plain)(torch.ones(2, 16, device="cpu")) == 8).all())
    except (AttributeError, RuntimeError):
        return False
