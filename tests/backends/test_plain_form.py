"""The faster of two kinds of plain steps is found, and plain decoding then takes it."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from dflash.backends.torch.packing import can_pack, kernel_choice, pack_linears
from dflash.backends.torch.plain_form import LEAST_PAIRS, MOST_PAIRS, packed_steps_are_faster
from dflash.backends.torch.target import TorchTarget
from dflash.types import Proposal
from tests.backends.tiny_targets import llama, tokens

pytestmark = pytest.mark.skipif(not can_pack(), reason="PyTorch without oneDNN")


class Stopwatch:
    """Seconds as the kernels of a model would take them: a forward's price depends on what its single rows run on."""

    def __init__(self, model: PreTrainedModel, plain: float, packed: float) -> None:
        self.now, self.forwards = 0.0, {False: 0, True: 0}
        choice = kernel_choice(model)
        assert choice is not None
        self.prices, self.choice = {False: plain, True: packed}, choice
        model.register_forward_hook(self._pay)

    def _pay(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        self.now += self.prices[self.choice.packs_single]
        self.forwards[self.choice.packs_single] += 1

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("plain", "packed", "expected"), [(0.02, 0.01, True), (0.01, 0.02, False)])
def test_the_faster_kind_wins(plain: float, packed: float, expected: bool) -> None:
    """Guards against a choice by anything else than time, and against a measurement of one kind twice."""
    model = llama()
    pack_linears(model)
    watch = Stopwatch(model, plain, packed)
    assert packed_steps_are_faster(model, clock=watch) is expected
    assert watch.forwards == {False: MOST_PAIRS + 2, True: MOST_PAIRS + 2}  # a prefill and a step to warm up


def test_slow_models_are_not_measured_for_long() -> None:
    """Guards against a load that takes many slow steps."""
    model = llama()
    pack_linears(model)
    watch = Stopwatch(model, 10.0, 9.0)
    assert packed_steps_are_faster(model, clock=watch)
    assert watch.forwards == {False: LEAST_PAIRS + 2, True: LEAST_PAIRS + 2}


def test_nothing_to_choose_without_packed_weights() -> None:
    """Guards against a measurement where both kinds are the same."""

    def clock() -> float:
        raise AssertionError("must not be read")

    assert packed_steps_are_faster(llama(), clock=clock) is False


@pytest.mark.parametrize("packs_single", [True, False])
def test_plain_steps_take_what_was_chosen(packs_single: bool) -> None:
    """Guards against a choice without effect: bits of a plain step are those of the kernels that were chosen."""
    model, unpacked = llama(), llama()
    pack_linears(model)
    plain = TorchTarget(unpacked).session(exact=False)
    chosen = TorchTarget(model, packs_single=packs_single).session(exact=False)
    for session in (plain, chosen):
        session.prefill(tokens(100))  # more rows than are packed: the same bits in both
    logits = [session.verify(1, Proposal()).logits for session in (plain, chosen)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(*logits) is not packs_single
