"""Every family of targets decodes losslessly, or is refused at load with the reason: the matrix.

Random weights, so that any wrongly kept, lost or shifted row changes the logits by far more than the tolerance; the
page docs/architectures.md lists the same rows.
"""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from dflash.backends.torch.target import TorchTarget
from tests.backends.architectures import ARCHITECTURES, model_of
from tests.backends.matrix import (
    BLOCK,
    DRAFTERS,
    PROMPT,
    KnowingDrafter,
    bare_logits,
    bare_text_is,
    chunking_error,
    decode,
    error,
    rollback_error,
)

TOLERANCE = 2e-3
"""Differences are of the order 1e-5 and logits of the order 1; a wrong row costs 0.1 and more (asserted below)."""
UNTAPPED = {"Gemma 3n": "its layers return several streams"}


@pytest.fixture(params=ARCHITECTURES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def model(family: str) -> PreTrainedModel:
    return model_of(family)


def test_rollback_oracle(model: PreTrainedModel) -> None:
    """Fault: rejected rows stay in some layer's state, kept ones are lost. Every kept count, prompts longer than the
    window, in both modes of decoding."""
    target = TorchTarget(model, exact_width=4)
    for kept in range(len(BLOCK) + 1):
        assert rollback_error(target, kept, exact=bool(kept % 2)) < TOLERANCE, kept
    for wrong in (-4, -1):  # a single token elsewhere in the text makes a difference that could not be missed
        other = [*PROMPT]
        other[wrong] += 1
        assert error(bare_logits(model, other)[-1], bare_logits(model, PROMPT)[-1]) > 50 * TOLERANCE


def test_greedy_text_is_that_of_the_bare_model(model: PreTrainedModel) -> None:
    """Fault: the text depends on the drafter. 64 tokens, eight windows deep."""
    target = TorchTarget(model, exact_width=4)
    plain = decode(target, None)
    assert bare_text_is(model, plain)
    assert len(set(plain)) > 8, "a text that repeats itself would hide faults"
    for kind in DRAFTERS:
        assert decode(target, KnowingDrafter(kind, [*PROMPT, *plain]), exact=kind == "own text") == plain, kind


def test_prefill_in_chunks(family: str, model: PreTrainedModel) -> None:
    """Fault: a chunk sees wrong keys or starts from a wrong state; features of another layer or other rows."""
    taps = () if family in UNTAPPED else (0,)
    for chunk in (1, 6, len(PROMPT)):
        assert chunking_error(model, taps, chunk) < TOLERANCE, chunk
