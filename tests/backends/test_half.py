"""A draft's weights in float16 give what they give in float32, and only where float16 can hold them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dflash.backends.torch.fused import packed
from dflash.backends.torch.half import HalfLinear, can_multiply, holds
from dflash.backends.torch.packing import MOST_ROWS, PackedLinear, can_pack

pytestmark = pytest.mark.skipif(not can_multiply(), reason="PyTorch or processor without FBGEMM")


def brain(*shape: int) -> Tensor:
    """Random numbers as bfloat16 stores them, tiny ones too."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    numbers.view(-1)[:5] = torch.tensor([1e-5, -3e-7, 1e-9, 0.0, -60000.0])
    return numbers.bfloat16().float()


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_equals_the_plain_layer(bias: bool) -> None:
    """Fault: a shape takes a wrong path or loses its bias; both sides of the row limit, and a share of a joint row."""
    plain = nn.Linear(48, 80, bias=bias)
    plain.weight.copy_(brain(80, 48))
    layer = packed(plain)
    assert isinstance(layer, HalfLinear)
    assert list(layer.state_dict()) == list(plain.state_dict())
    for shape in [(1, 48), (1, 1, 5, 48), (1, MOST_ROWS, 48), (1, MOST_ROWS + 1, 48)]:
        inputs = torch.randn(shape)
        torch.testing.assert_close(layer(inputs), plain(inputs), rtol=1e-5, atol=1e-2)  # a weight is 60,000
    share = torch.randn(3, 96)[:, 48:]
    torch.testing.assert_close(layer(share), plain(share), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("odd", [1 + 2.0**-12, 70000.0, torch.inf])
def test_weights_that_do_not_fit_stay(odd: float) -> None:
    """Fault: a draft in float32 is rounded, or numbers beyond float16's range become infinite."""
    linear = nn.Linear(48, 80, bias=False).requires_grad_(False)
    linear.weight.copy_(brain(80, 48))
    assert holds(linear.weight)
    linear.weight[7, 7] = odd
    assert not holds(linear.weight)
    assert isinstance(packed(linear), PackedLinear) == can_pack()
    assert not holds(linear.weight.bfloat16())


def test_tiny_layers_are_not_rounded_away() -> None:
    """Fault: a bound that knows no scale takes weights that float16 cannot tell from one another."""
    tiny = (1e-7 * torch.randn(8, 8, generator=torch.Generator().manual_seed(0))).bfloat16().float()
    assert not holds(tiny)
    assert holds((1e5 * tiny).bfloat16().float())


def test_gradients_flow_through_the_plain_weight() -> None:
    """Fault: a draft in a training graph silently drops gradients."""
    plain = nn.Linear(8, 4, bias=False)
    plain.weight.data.copy_(brain(4, 8))
    inputs = torch.randn(3, 8, requires_grad=True)
    packed(plain)(inputs).sum().backward()
    assert inputs.grad is not None
