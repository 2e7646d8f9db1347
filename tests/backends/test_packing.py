"""Packed linear layers compute what the plain ones do, and a row's bits do not depend on its forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from dflash.backends.torch import packing
from dflash.backends.torch.exactness import probe
from dflash.backends.torch.memory import available_bytes
from dflash.backends.torch.packing import (
    MOST_BYTES,
    MOST_ROWS,
    MOST_SHARE,
    MOST_UNSEEN_BYTES,
    KernelChoice,
    PackedLinear,
    can_pack,
    kernel_choice,
    pack_linears,
)
from dflash.backends.torch.target import TorchTarget
from dflash.types import Proposal
from tests.backends.tiny_targets import NUM_LAYERS, llama, qwen2, tokens

pytestmark = pytest.mark.skipif(not can_pack(), reason="PyTorch without oneDNN")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@torch.no_grad()
def test_equals_the_plain_layer(bias: bool, exact: bool) -> None:
    """Fault: a shape takes a wrong path or loses its bias; every path and both sides of the row limit."""
    plain = nn.Linear(48, 80, bias=bias)
    packed = PackedLinear(plain, KernelChoice())
    packed.choice.packs_single = exact
    for shape in [(48,), (1, 48), (1, 5, 48), (1, MOST_ROWS, 48), (1, MOST_ROWS + 1, 48), (2, 33, 48)]:
        inputs = torch.randn(shape)
        torch.testing.assert_close(packed(inputs), plain(inputs), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_single_rows_take_the_kernel_that_was_asked_for() -> None:
    """Fault: plain decoding pays for exactness, or exact decoding does not get it."""
    plain = nn.Linear(64, 256, bias=False)
    packed = PackedLinear(plain, KernelChoice())
    inputs = torch.randn(8, 64)
    assert torch.equal(packed(inputs[3:4]), plain(inputs[3:4]))
    packed.choice.packs_single = True
    assert torch.equal(packed(inputs[3:4]), packed(inputs)[3:4])


def test_gradients_flow_through_the_plain_weight() -> None:
    """Fault: a packed model in a training graph silently drops gradients."""
    packed = PackedLinear(nn.Linear(8, 4), KernelChoice())
    inputs = torch.randn(3, 8, requires_grad=True)
    packed(inputs).sum().backward()
    assert inputs.grad is not None
    torch.testing.assert_close(inputs.grad, packed.weight.sum(dim=0).expand(3, 8))


@pytest.mark.parametrize("family", [llama, qwen2])
def test_packed_model_equals_the_plain_one(family: Callable[[], PreTrainedModel]) -> None:
    """Fault: a layer is missed, a bias is lost (qwen2), the tied head drifts from the embedding (llama), or the model
    changes its names and weights."""
    plain, model = family(), family()
    assert pack_linears(model) == 7 * NUM_LAYERS + 1
    assert pack_linears(model) == 0
    assert all(torch.equal(weight, plain.state_dict()[name]) for name, weight in model.state_dict().items())
    assert model.state_dict().keys() == plain.state_dict().keys()
    if model.config.tie_word_embeddings:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    targets = TorchTarget(model, taps=(1,)), TorchTarget(plain, taps=(1,))
    for exact in (False, True):
        sessions = [target.session(exact=exact) for target in targets]
        for proposal in ((), (2, 3, 4)):
            for session in sessions:
                session.prefill(tokens(20))
            ours, theirs = (session.verify(1, Proposal(proposal)) for session in sessions)
            torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours.features, theirs.features, rtol=1e-4, atol=1e-4)


def test_other_dtypes_are_left_alone() -> None:
    model = llama()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert pack_linears(model) == 0
    assert kernel_choice(model) is None


class Quantised(torch.Tensor):
    """Weights of a class of their own, as torchao's are: they call themselves float32."""


def test_weights_of_another_class_are_left_alone() -> None:
    """Fault: a target that torchao has quantised fails to load, because its weights have no packed layout."""
    model = llama()
    num_linears = sum(type(module) is nn.Linear for module in model.modules())
    quantised = [module for module in model.get_decoder().layers[0].modules() if type(module) is nn.Linear]
    for module in quantised:
        module.weight = nn.Parameter(module.weight.detach().as_subclass(Quantised), requires_grad=False)
    assert pack_linears(model) == num_linears - len(quantised) > 0
    assert all(type(module) is nn.Linear for module in quantised)


def test_probe_of_a_packed_model() -> None:
    """The point of packing: on the kernels known so far one row gives the bits of many. Where this fails the product
    still works (decoding is padded), but the speed that the documentation promises is gone."""
    model = llama()
    pack_linears(model)
    found = probe(model, max_width=16)
    assert (found.holds, found.width) == (True, 1), found


def test_models_that_would_fill_the_memory_are_left_alone() -> None:
    """Guards against a second copy of the weights where memory is short; the limit is on the share, not below it."""
    needed = sum(child.weight.nbytes for child in llama().modules() if isinstance(child, nn.Linear))
    short, enough = llama(), llama()
    assert pack_linears(short, available=int(needed / MOST_SHARE) - 8) == 0
    assert kernel_choice(short) is None
    assert pack_linears(enough, available=int(needed / MOST_SHARE) + 8) > 0


def test_little_is_packed_where_the_memory_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: without /proc both target and draft pack up to the limit of a machine that has the memory for it, since
    nothing tells the second of them what the first has taken."""
    asked = []
    monkeypatch.setattr(packing, "available_bytes", lambda: asked.append(True))
    assert 2 * MOST_UNSEEN_BYTES < MOST_BYTES
    needed = sum(child.weight.nbytes for child in llama().modules() if isinstance(child, nn.Linear))
    for limit, packs in ((needed - 1, False), (needed, True)):
        monkeypatch.setattr(packing, "MOST_UNSEEN_BYTES", limit)
        model = llama()
        assert (pack_linears(model) > 0) == packs == (kernel_choice(model) is not None)
    assert len(asked) == 2


def test_available_memory(tmp_path: Path) -> None:
    """Guards against a container's limit that is overlooked, a page cache that counts as used, and odd systems."""
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    assert available_bytes(meminfo=meminfo, group=group) is None
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:  4000 kB\n")
    assert available_bytes(meminfo=meminfo, group=group) == 4000 * 1024
    group.mkdir()
    (group / "memory.current").write_text("900\n")
    (group / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    for limit, expected in (("max", 4000 * 1024), ("1000", 400), ("garbage", 4000 * 1024), ("500", 0)):
        (group / "memory.max").write_text(limit)
        assert available_bytes(meminfo=meminfo, group=group) == expected
    meminfo.write_text("nothing of the kind\n")
    assert available_bytes(meminfo=meminfo, group=tmp_path) is None
    assert pack_linears(llama(), available=None) > 0
