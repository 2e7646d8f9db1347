"""The width probe finds the class of forwards that give the same bits, and notices every way to break it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dflash.backends.torch.exactness import probe
from dflash.backends.torch.joining import join_and_pack
from dflash.backends.torch.key_lengths import AttentionShape, attention_shapes, measured_lengths
from dflash.backends.torch.states.sliding import PAGE
from dflash.backends.torch.target import TorchTarget
from dflash.core.exactness import find_width_class
from dflash.core.key_lengths import BLOCK
from dflash.types import Proposal, Verdict
from tests.backends.architectures import ARCHITECTURES, model_of
from tests.backends.tiny_targets import llama, qwen3, tokens

NUDGE = 1e-5
"""Added by the injected faults: far below what changes a text, far above one bit of these hidden states."""


class FakeSession:
    """A target whose row is a function of its position, nudged by a fault: the probe's logic without any kernels."""

    def __init__(self, fault: Callable[[int, int, int], float]) -> None:
        """`fault(width, offset, num_keys)` is added to the row at `offset` of a forward."""
        self.fault = fault
        self.num_tokens = 0
        self.num_keys = 128

    def return_at_least(self, num_keys: int) -> None:
        self.num_keys = num_keys

    def prefill(self, prompt_ids: Sequence[int]) -> Verdict:
        self.num_tokens = len(prompt_ids)
        return Verdict(torch.zeros(1, 3))

    def verify(self, anchor: int, proposal: Proposal) -> Verdict:
        ids = [anchor, *proposal.tokens]
        rows = [
            [float(token), self.num_tokens + offset, self.fault(len(ids), offset, self.num_keys)]
            for offset, token in enumerate(ids)
        ]
        return Verdict(torch.tensor(rows))

    def commit(self, path: Sequence[int]) -> None:
        self.num_tokens += len(path)


def inject(model: PreTrainedModel, fault: Callable[[torch.Tensor], torch.Tensor | float]) -> PreTrainedModel:
    """Add `fault(hidden)` to the output [1, rows, H] of the first layer's MLP."""
    model.get_decoder().layers[0].mlp.register_forward_hook(lambda module, inputs, output: output + fault(output))
    return model


def test_probe_on_this_machine() -> None:
    """Whatever this machine's kernels do, the answer is consistent, and it holds in use: see the next test."""
    found = probe(llama(), max_width=16)
    assert found.widths_tried == tuple(sorted(found.widths_tried))
    assert found.widths_tried[-1] == 16
    assert found.width >= 1
    assert found.reason
    if found.holds:
        assert found.width < 16


@pytest.mark.parametrize("family", [llama, qwen3])
def test_found_class_gives_the_same_bits_in_use(family: Callable[[], PreTrainedModel]) -> None:
    """Fault: the probe compares other forwards than decoding runs. Plain steps padded to the found width against
    blocks with rejected tails, over forty tokens: every logits row must have the same bits."""
    model = family()
    found = probe(model, max_width=16)
    if not found.holds:
        pytest.skip(found.reason)
    target = TorchTarget(model, exact_width=found.width, key_lengths=found.key_lengths)
    text = tokens(60, seed=3)
    plain, blocks = target.session(), target.session()
    for each in (plain, blocks):
        each.prefill(text[:10])
    expected = []
    for token in text[10:50]:
        expected.append(plain.verify(token, Proposal()).logits[0])
        plain.commit(range(1))
    fed = 0
    for kept in (1, 3, 8, 2, 16, 4, 6):
        tail = tokens(16 - kept, seed=kept) if kept % 2 else []
        logits = blocks.verify(text[10 + fed], Proposal((*text[11 + fed : 10 + fed + kept], *tail))).logits
        for row in range(kept):
            assert torch.equal(logits[row], expected[fed + row])
        blocks.commit(range(kept))
        fed += kept
    assert fed == 40


@pytest.mark.parametrize(
    ("family", "attention", "dtype"),
    [
        ("Llama", "sdpa", torch.float32),
        ("Qwen3", "eager", torch.float32),
        ("Llama", "sdpa", torch.bfloat16),
        ("Gemma 3", "sdpa", torch.float32),
    ],
    ids=str,
)
def test_no_number_of_keys_changes_a_bit(family: str, attention: str, dtype: torch.dtype) -> None:
    """Fault: a plain step still fits into a bucket of keys, a block behind the same text needs the next one, and the
    kernel sums so many keys in another order (MKL: 193 to 383). Texts over every border up to 1,300 tokens, where
    blocks begin before it and end behind it."""
    model = wide(family, head_dim=64)
    torch.nn.Module.to(model, dtype)
    model.set_attn_implementation(attention)
    for layer in model.get_decoder().layers:
        layer.self_attn.o_proj.weight.data.mul_(100)  # so that what attention adds is not lost in what it adds to
    found = probe(model, max_width=16)
    if not found.holds:
        pytest.skip(f"no width class on this machine: {found.reason}")
    target = TorchTarget(model, exact_width=found.width, key_lengths=found.key_lengths)
    text = tokens(1300, seed=7)
    session = target.session()
    for border in range(32, 1300, 32):
        last = border - found.width  # where a plain step, padded, still fits
        session.prefill(text[session.num_tokens : last])
        step = session.verify(text[last], Proposal()).logits
        block = session.verify(text[last], Proposal(tuple(text[last + 1 : last + 8]))).logits
        assert torch.equal(step[0], block[0]), border
    target.close()


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("Llama", ([AttentionShape(True, 2, 8, 8)], True)),
        ("Gemma 2", ([AttentionShape(False, 4, 8, 8)], True)),
        ("Gemma 4", ([AttentionShape(True, 2, 8, 8), AttentionShape(True, 2, 512, 512)], True)),
        ("DeepSeek-V3, Kimi-K2", ([AttentionShape(True, 4, 16, 12)], True)),
        ("Mamba-2", ([], False)),
    ],
)
def test_the_attention_that_runs_is_the_one_measured(family: str, expected: tuple[list[AttentionShape], bool]) -> None:
    """Fault: numbers of keys are measured on heads of another width than the target's, as its configuration has it:
    layers of two widths, latent attention whose keys are wider than its values."""
    target = TorchTarget(model_of(family))
    assert attention_shapes(target) == expected
    target.close()


def test_attention_of_another_make_gets_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: lengths measured on one layer's attention are taken for another's, which nobody saw."""
    model = llama()
    attend = model.get_decoder().layers[1].self_attn.forward

    def by_sums_of_its_own(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return attend(*args, **kwargs)

    monkeypatch.setattr(model.get_decoder().layers[1].self_attn, "forward", by_sums_of_its_own)
    target = TorchTarget(model)
    assert attention_shapes(target)[1] is False
    lengths = measured_lengths(target)
    assert lengths is not None
    assert lengths.within == (BLOCK,)
    target.close()


def test_sums_that_depend_on_every_number_of_keys_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: where no numbers of keys agree, decoding is called exact all the same."""
    monkeypatch.setattr("dflash.backends.torch.exactness.measured_lengths", lambda target: None)
    found = probe(llama(), max_width=16)
    assert not found.holds
    assert "how many keys" in found.reason


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lambda width, offset, num_keys: 0, (True, 1, 1)),
        (lambda width, offset, num_keys: width == 1, (True, 2, 1)),
        (lambda width, offset, num_keys: width < 4, (True, 4, 3)),
        (lambda width, offset, num_keys: width in (5, 7), (True, 8, 7)),
        (lambda width, offset, num_keys: width == 2, (True, 3, 2)),
        (lambda width, offset, num_keys: width, (False, 1, 11)),
        (lambda width, offset, num_keys: width < 16, (False, 1, 11)),
        (lambda width, offset, num_keys: offset, (False, 1, 16)),
        (lambda width, offset, num_keys: offset > 12, (False, 1, 16)),
        (lambda width, offset, num_keys: num_keys > 512, (False, 1, 1)),
        (lambda width, offset, num_keys: num_keys > 128, (False, 1, 1)),
    ],
)
def test_logic_of_the_probe(fault: Callable[[int, int, int], float], expected: tuple[bool, int, int]) -> None:
    """Fault: a width above a gap in the class is chosen too small (5 and 7 differ: 6 and 4 must not be chosen), or a
    dependence on offset or number of keys passes. Expected: holds, width, narrowest width tried."""
    found = find_width_class(FakeSession(fault), vocab_size=50, max_width=16, block_size=1, same=torch.equal)
    assert (found.holds, found.width, found.widths_tried[0]) == expected
    assert found.widths_tried[-1] == 16


def test_injected_step_in_the_width_is_found() -> None:
    """Fault: narrow forwards of a real model take another path, as kernels do, and the probe does not see it."""
    found = probe(inject(llama(), lambda hidden: NUDGE if hidden.shape[1] < 6 else 0.0), max_width=16)
    assert not found.holds or found.width >= 6
    assert found.widths_tried[0] >= 5


@pytest.mark.parametrize(
    "fault",
    [
        lambda hidden: NUDGE * hidden.shape[1],
        lambda hidden: NUDGE * torch.arange(hidden.shape[1])[:, None],
        lambda hidden: NUDGE * hidden.sum(dim=1, keepdim=True),
    ],
    ids=["width", "offset", "other rows"],
)
def test_injected_dependence_is_found(fault: Callable[[torch.Tensor], torch.Tensor | float]) -> None:
    """Fault: results that depend on width, on the row's offset or on the other rows pass for exact."""
    found = probe(inject(llama(), fault), max_width=16)
    assert (found.holds, found.width) == (False, 1)
    assert "16 rows" in found.reason


def test_probe_leaves_the_model_as_it_was() -> None:
    """Fault: hooks or states of the probe stay behind and slow down or change decoding."""
    model = llama()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    probe(model, max_width=4)
    assert not any(layer._forward_hooks for layer in model.get_decoder().layers)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_short_contexts_limit_the_probe() -> None:
    """Fault: the probe itself runs out of the context of a small model."""
    assert probe(llama(max_length=16), max_width=32).widths_tried[-1] == 5


def wide(family: str, head_dim: int = 16) -> PreTrainedModel:
    """The tiny model with heads of 16: with 8, attention kernels have no width class."""
    architecture = ARCHITECTURES[family]
    heads = {"hidden_size": 96, "num_attention_heads": 6, "head_dim": head_dim, "max_position_embeddings": 2048}
    if family == "Granite 4":
        heads |= {"mamba_d_head": 24, "num_local_experts": 0}
    return dataclasses.replace(architecture, changes={**architecture.changes, **heads}).build()


@pytest.mark.parametrize("family", ["Mistral", "Gemma 3"])
def test_windows_give_the_same_bits_over_pages(family: str) -> None:
    """Fault: storage of a window moves on at another token in plain than in speculative decoding, and with it the
    order of summation. Texts beyond a page; plain steps against blocks with rejected tails."""
    model = wide(family)
    found = probe(model, max_width=16)
    if not found.holds:
        pytest.skip(f"no width class on this machine: {found.reason}")
    target = TorchTarget(model, exact_width=found.width, key_lengths=found.key_lengths)
    text = tokens(PAGE + 40, seed=6)
    plain, drafted = target.session(), target.session()
    for session in (plain, drafted):
        session.prefill(text[: PAGE - 12])
    fed = PAGE - 12
    while fed < PAGE + 24:
        kept = 1 + fed % 5
        block = drafted.verify(text[fed], Proposal((*text[fed + 1 : fed + kept], 1, 2)))
        drafted.commit(range(kept))
        for row in range(kept):
            step = plain.verify(text[fed + row], Proposal())
            plain.commit(range(1))
            assert torch.equal(step.logits[0], block.logits[row]), fed + row
        fed += kept
    target.close()


def test_windows_that_may_not_move_on_are_noticed() -> None:
    """Fault: the probe tries the front of the text only, where no window has moved on yet."""
    model = wide("Mistral")
    found = probe(model, max_width=16)

    def nudged(module: object, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs["attention_mask"]
        if mask is not None and mask.shape[-1] > PAGE and (mask[..., :PAGE] != 0).all():
            kwargs["hidden_states"].add_(NUDGE)

    model.get_decoder().layers[0].self_attn.register_forward_pre_hook(nudged, with_kwargs=True)
    broken = probe(model, max_width=16)
    assert not broken.holds
    assert not found.holds or "in front of a window" in broken.reason


def test_rows_that_depend_on_their_neighbours_are_noticed() -> None:
    """Fault: an expert multiplies as many rows as chose it, so that a row's bits depend on the other tokens, and the
    probe's own text happens not to show it."""
    model = llama()
    assert probe(model, max_width=16).holds

    def nudge(module: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output + NUDGE * (inputs[0] != inputs[0][:, :1]).any()

    model.get_input_embeddings().register_forward_hook(nudge)
    found = probe(model, max_width=16)
    assert not found.holds
    assert "tokens beside it" in found.reason


@pytest.mark.parametrize("family", ["Qwen3.5", "Granite 4", "LFM2"])
def test_recurrent_layers_give_the_same_bits(family: str) -> None:
    """Fault: a block takes the recurrence by another formula than single steps do, or a padding row enters the state.
    Blocks with rejected tails against plain steps, in the class that the probe finds for the packed model."""
    model = wide(family)
    join_and_pack(model)
    found = probe(model, max_width=16)
    if not found.holds:
        pytest.skip(f"no width class on this machine: {found.reason}")
    target = TorchTarget(model, exact_width=found.width, key_lengths=found.key_lengths)
    text = tokens(60, seed=6)
    plain, drafted = target.session(), target.session()
    for session in (plain, drafted):
        session.prefill(text[:20])
    fed = 20
    while fed < 50:
        kept = 1 + fed % 5
        block = drafted.verify(text[fed], Proposal((*text[fed + 1 : fed + kept], 1, 2)))
        drafted.commit(range(kept))
        for row in range(kept):
            step = plain.verify(text[fed + row], Proposal())
            plain.commit(range(1))
            assert torch.equal(step.logits[0], block.logits[row]), fed + row
        fed += kept
    target.close()
