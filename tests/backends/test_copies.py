"""A copy of a model, or one that was stored, computes what the model does, whatever its linear layers have become."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from dflash.backends.torch.compat import GROUPED_ATTENTION
from dflash.backends.torch.draft_attention import ContextKV
from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.eagle3_model import Eagle3Model
from dflash.backends.torch.half import HalfLinear, can_multiply
from dflash.backends.torch.joining import JoinedLinear, join_and_pack
from dflash.backends.torch.packing import KernelChoice, PackedLinear, can_pack, kernel_choice, pack_linears
from dflash.backends.torch.target import TorchTarget
from dflash.types import Proposal
from tests.backends.architectures import ARCHITECTURES
from tests.backends.architectures import tokens as family_tokens
from tests.backends.eagle3_drafts import eagle3_config, random_eagle3
from tests.backends.tiny_pair import HIDDEN, draft_config, random_draft
from tests.backends.tiny_targets import llama, qwen2, tokens

pytestmark = pytest.mark.skipif(not can_pack(), reason="PyTorch without oneDNN")


def stored(model: nn.Module) -> nn.Module:
    """Written by `torch.save` and read again."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read: nn.Module = torch.load(file, weights_only=False)
    return read


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deep copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": stored,
}


def decoded(model: nn.Module, text: list[int]) -> Tensor:
    """Logits of a block and of a plain step, in the exact and in the plain form."""
    assert isinstance(model, PreTrainedModel)
    target = TorchTarget(model)
    rows = []
    for exact in (True, False):
        session = target.session(exact=exact)
        session.prefill(text[:5])
        rows.append(session.verify(text[5], Proposal(tuple(text[6:10]))).logits)
        session.commit(range(5))
        rows.append(session.verify(text[10], Proposal()).logits)
        session.close()
    target.close()
    return torch.cat(rows)


def packed_layers(model: nn.Module) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("pack", [pack_linears, join_and_pack])
@pytest.mark.parametrize("make", [llama, qwen2])
def test_a_copied_target_gives_the_same_bits(
    make: Callable[[], PreTrainedModel], pack: Callable[[PreTrainedModel], int], how: str
) -> None:
    """Fault: what belongs to a thread, or oneDNN's layout, cannot be copied, or the copy computes with other kernels
    (biases: qwen2; a tied head: llama)."""
    model, text = make(), tokens(11)
    pack(model)
    expected = decoded(model, text)
    twin = COPIES[how](model)
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    assert torch.equal(decoded(twin, text), expected)
    # It is a model of its own: packed weights, choices and shares are not those of the first.
    ours, theirs = packed_layers(model), packed_layers(twin)
    assert len({id(layer.choice) for layer in theirs}) == 1
    assert theirs[0].choice is not ours[0].choice
    assert all(one._packed is None or one._packed is not other._packed for one, other in zip(ours, theirs, strict=True))
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(decoded(twin, text), expected)


def test_a_stored_target_runs_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the stored model names an attention that only the process that stored it has registered."""
    model, text = llama(), tokens(11)
    join_and_pack(model)
    expected = decoded(model, text)
    written = pickle.dumps(model)
    for registry in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.delitem(registry._global_mapping, GROUPED_ATTENTION)
    assert torch.equal(decoded(pickle.loads(written), text), expected)


@pytest.mark.parametrize("family", [name for name, one in ARCHITECTURES.items() if one.refused is None])
def test_every_family_can_be_copied(family: str) -> None:
    """Fault: only plain decoders were thought of."""
    model, text = ARCHITECTURES[family].build(), family_tokens(11)
    assert join_and_pack(model) > 0
    expected = decoded(model, text)
    assert torch.equal(decoded(copy.deepcopy(model), text), expected)


@torch.no_grad()
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3.5", "Kimi-Linear", "LFM2", "Mamba-2"])
def test_a_copy_of_an_open_target_is_a_model_of_its_own(family: str, how: str) -> None:
    """Fault: hooks and forwards that an open target keeps on its model cannot be stored; or a deep copy has them too,
    computes with the first model's weights and is recorded by its target. Two targets are open at a time, so that one
    forward of ours stands in for another."""
    model, ids = ARCHITECTURES[family].build(), torch.tensor([family_tokens(9)])
    join_and_pack(model)
    targets = [TorchTarget(model, taps=(0,)), TorchTarget(model, taps=(1,))]
    assert all((target.replay is None) == (family == "Qwen3") for target in targets)
    expected = model(ids).logits
    twin = COPIES[how](model)
    with targets[0].recorder.recording() as rows:
        model(ids)
        twin(ids[:, :4])
    assert [one.shape[1] for one in rows] == [9]
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(twin(ids).logits, expected)
    for target in targets:
        target.close()
    assert torch.equal(twin(ids).logits, expected)
    again = COPIES[how](twin)
    assert torch.equal(decoded(again, family_tokens(11)), decoded(twin, family_tokens(11)))


def test_a_copied_joint_does_not_share() -> None:
    """Fault: a copy holds the rows of a forward of the first, or both give out one another's."""
    model = llama()
    join_and_pack(model)
    first, second = [module for module in model.modules() if isinstance(module, JoinedLinear)][:2]
    inputs = torch.randn(2, first.in_features)
    with torch.inference_mode():
        first(inputs)  # the second's share is left lying
        twin_first, twin_second = copy.deepcopy(nn.ModuleList([first, second]))
        assert isinstance(twin_first, JoinedLinear) and isinstance(twin_second, JoinedLinear)
        assert twin_first._joint is twin_second._joint is not first._joint
        assert twin_first._joint._local.held is None
        assert first._joint._local.held is not None
        assert torch.equal(twin_second(inputs), second(inputs))


def test_a_copied_choice_is_nobodys_yet() -> None:
    """Fault: a thread's choice is taken for the copy's default, or its default is lost."""
    for default in (False, True):
        choice = KernelChoice(packs_single=default)
        choice.packs_single = not default
        for twin in (copy.deepcopy(choice), pickle.loads(pickle.dumps(choice))):
            found: list[bool] = [twin.packs_single]
            thread = threading.Thread(target=lambda one=twin, seen=found: seen.append(one.packs_single))
            thread.start()
            thread.join()
            assert found == [default, default]


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("halves", [False, True])
@torch.inference_mode()
def test_a_copied_draft_gives_the_same_bits(halves: bool, how: str) -> None:
    """Fault: joint layers, or weights in float16, are lost or refuse."""
    network = random_draft(draft_config()).eval().requires_grad_(False)
    if halves:
        network.bfloat16().float()
    network.for_decoding()
    kinds = {type(module) for module in network.modules()}
    assert HalfLinear in kinds if halves and can_multiply() else PackedLinear in kinds
    twin = COPIES[how](network)
    assert isinstance(twin, DraftModel)
    features, block = torch.randn(1, 5, 2 * HIDDEN), torch.randn(1, 1, 8, HIDDEN)
    contexts = [one.project_context(features, torch.arange(5)[None]) for one in (network, twin)]
    ours, theirs = (one(block, torch.tensor([[5]]), rows) for one, rows in zip((network, twin), contexts, strict=True))
    assert isinstance(contexts[0][0], ContextKV)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("how", COPIES)
@torch.inference_mode()
def test_a_copied_eagle3_draft_gives_the_same_bits(how: str) -> None:
    """Fault: the other kind of draft, packed by itself, was not thought of."""
    network = random_eagle3(eagle3_config()).eval().requires_grad_(False)
    network.for_decoding()
    assert kernel_choice(network) is not None
    twin = COPIES[how](network)
    assert isinstance(twin, Eagle3Model)
    features = torch.randn(3, network.fc.in_features)
    assert torch.equal(network.fuse(features), twin.fuse(features))
