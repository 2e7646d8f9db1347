"""Joined layers compute what the layers apart do, in every family, and give way where they cannot."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash.backends.torch import joining, packing
from dflash.backends.torch.exactness import probe
from dflash.backends.torch.joining import JoinedLinear, Joint, join_and_pack
from dflash.backends.torch.packing import PackedLinear, PackedWeight, can_pack
from dflash.backends.torch.target import TorchTarget
from dflash.types import Proposal
from tests.backends.architectures import ARCHITECTURES
from tests.backends.architectures import tokens as family_tokens
from tests.backends.tiny_targets import NUM_LAYERS, llama, qwen2, tokens

pytestmark = pytest.mark.skipif(not can_pack(), reason="PyTorch without oneDNN")

JOINED_BY_LAYER = 5  # q, k, v; gate, up


def joined(model: PreTrainedModel) -> list[JoinedLinear]:
    return [module for module in model.modules() if isinstance(module, JoinedLinear)]


def decoded(model: PreTrainedModel, text: list[int]) -> Tensor:
    """Logits of single and of several rows behind a prompt."""
    target = TorchTarget(model)
    session = target.session()
    session.prefill(text[:5])
    rows = [session.verify(text[5], Proposal(tuple(text[6:10]))).logits]
    session.commit(range(5))
    rows.append(session.verify(text[10], Proposal()).logits)
    target.close()
    return torch.cat(rows)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_family_computes_the_same(family: str) -> None:
    """Fault: layers are joined that do not read the same, or a family's code cannot use a share of a joint output."""
    if ARCHITECTURES[family].refused:
        pytest.skip("refused at load")
    apart, together = ARCHITECTURES[family].build(), ARCHITECTURES[family].build()
    together.load_state_dict(apart.state_dict())
    assert join_and_pack(together) > 0
    text = family_tokens(11)
    expected = decoded(apart, text)
    torch.testing.assert_close(decoded(together, text), expected, rtol=2e-3, atol=2e-3)
    assert together.state_dict().keys() == apart.state_dict().keys()


@pytest.mark.parametrize("make", [llama, qwen2])
def test_what_is_joined(make: object) -> None:
    """Fault: nothing is joined, or layers with biases lose them; the other layers are packed alone."""
    assert callable(make)
    model = make()
    plain = sum(type(module) is nn.Linear for module in model.modules())
    assert join_and_pack(model) == plain
    assert len(joined(model)) == JOINED_BY_LAYER * NUM_LAYERS
    alone = [module for module in model.modules() if type(module) is PackedLinear]
    assert len(alone) == plain - len(joined(model))
    assert probe(model, max_width=16).width == 1


def test_a_joint_forgets() -> None:
    """Fault: a share is given out again when the same tensor comes with other numbers, or another tensor gets it."""
    parts = [nn.Linear(8, width) for width in (4, 6)]
    joint = Joint(parts)
    with torch.inference_mode():
        inputs = torch.randn(2, 8)
        for _ in range(2):
            for number in (1, 0):
                torch.testing.assert_close(joint.share(inputs, number), parts[number](inputs))
            inputs.add_(1)
        joint.share(inputs, 0)  # the other share is left lying
        other = torch.randn(2, 8)
        torch.testing.assert_close(joint.share(other, 1), parts[1](other))
        torch.testing.assert_close(joint.share(other, 0), parts[0](other))


def test_threads_do_not_meet() -> None:
    """Fault: one thread takes the share that another one's forward left for its sibling."""
    parts = [nn.Linear(8, 4), nn.Linear(8, 4)]
    joint, inputs = Joint(parts), torch.randn(2, 8)
    with torch.inference_mode():
        joint.share(inputs, 0)
        held = joint._local.held
        thread = threading.Thread(target=lambda: joint.share(inputs, 0))
        thread.start()
        thread.join()
        assert joint._local.held is held


@pytest.mark.parametrize("fault", ["raises", "other logits", "NaN"])
def test_what_cannot_be_joined_is_left_apart(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a model whose code takes no share of a joint output cannot be loaded, or decodes nonsense."""

    def share(self: Joint, inputs: Tensor, number: int) -> Tensor:
        if fault == "raises":
            raise RuntimeError("view size is not compatible")
        filled = torch.nan if fault == "NaN" else 0.0
        return torch.full((*inputs.shape[:-1], self._sizes[number]), filled)

    monkeypatch.setattr(Joint, "share", share)
    model, plain = llama(), llama()
    num_linears = sum(type(module) is nn.Linear for module in model.modules())
    assert join_and_pack(model) == num_linears
    assert not joined(model)
    text = tokens(11)
    torch.testing.assert_close(decoded(model, text), decoded(plain, text), rtol=1e-4, atol=1e-4)


def test_hidden_tokens_hide_no_fault() -> None:
    """Fault: beside a logit of -inf, or the least number there is, every difference looks small."""
    least = torch.finfo(torch.float32).min
    for hidden in (-torch.inf, least):
        expected = torch.tensor([[hidden, 1.0, 2.0]])
        assert joining._alike(expected + torch.tensor([[0.0, 1e-6, 0.0]]), expected)
        assert not joining._alike(torch.tensor([[hidden, 1.0, 2.1]]), expected)
        assert not joining._alike(torch.tensor([[0.0, 1.0, 2.0]]), expected)


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_layers_that_others_changed_stay(how: str) -> None:
    """Fault: a hook or a forward that another library put on a layer is lost with it."""
    model, text = llama(), tokens(11)
    layer = next(module for name, module in model.named_modules() if name.endswith("q_proj"))
    assert isinstance(layer, nn.Linear)
    if how == "hook":
        layer.register_forward_hook(lambda module, inputs, output: 3 * output)
    else:
        bare = layer.forward
        vars(layer)["forward"] = lambda inputs: 3 * bare(inputs)
    expected = decoded(model, text)
    join_and_pack(model)
    assert any(module is layer for module in model.modules())
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    torch.testing.assert_close(decoded(model, text), expected, rtol=1e-4, atol=1e-4)


def test_no_room_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: joint copies are made beyond what packing may take."""
    monkeypatch.setattr(packing, "PackedWeight", lambda *_: pytest.fail("made a copy"))
    monkeypatch.setattr(joining, "PackedWeight", lambda *_: pytest.fail("made a copy"))
    model = llama()
    assert join_and_pack(model, available=1) == 0
    assert PackedWeight(torch.zeros(4, 4)) is not None


def test_room_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the layers that stay alone are looked for and weighed a second time, when the joint copies have taken of
    the memory that both questions are about, and a model is left half packed."""
    amounts = iter([2**40])
    monkeypatch.setattr(packing, "available_bytes", lambda: next(amounts))
    looked: list[nn.Module] = []

    def is_bare(module: nn.Module) -> bool:
        looked.append(module)
        return type(module) is nn.Linear

    monkeypatch.setattr(packing, "is_bare", is_bare)
    model = llama()
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    assert join_and_pack(model) == len(linears)
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == len(linears)
    assert sum(type(module) is nn.Linear for module in looked) == len(linears)
