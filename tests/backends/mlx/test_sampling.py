"""The MLX acceptor against the NumPy specification, with keyed draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

mx = pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")

from dflash.backends.mlx.sampling import MLXAcceptor  # noqa: E402
from dflash.backends.mlx.tokens import DeviceTokens  # noqa: E402
from dflash.core.reference import ReferenceAcceptor  # noqa: E402
from dflash.errors import ConfigError, ModelError  # noqa: E402
from dflash.types import Acceptance, Proposal, SamplingParams, Verdict  # noqa: E402
from tests.backends.test_sampling import requests  # noqa: E402
from tests.fakes import VOCAB, guess_right, guess_sometimes, random_logits, run_rounds, tokens_of  # noqa: E402
from tests.options import OPTIONS, with_option  # noqa: E402

PROMPT = (3, 1, 4, 1, 5)
LOGITS = random_logits(2)


class FromNumpy:
    """Lets the MLX acceptor judge the fakes' NumPy logits, with draft tokens that are still on the device."""

    def __init__(self, acceptor: MLXAcceptor) -> None:
        self._acceptor = acceptor

    def accept(self, proposal: Proposal, verdict: Verdict) -> Acceptance:
        lazy = Proposal(DeviceTokens(mx.array(list(proposal.tokens), dtype=mx.int32)))
        return self._acceptor.accept(lazy, Verdict(mx.array(verdict.logits)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_gives_the_reference_text(option: str, temperature: float) -> None:
    """Guards against options that are skipped, misplaced or computed on the wrong prefix."""
    params = with_option(option, temperature=temperature, max_new_tokens=40, seed=5)
    expected = tokens_of(run_rounds(LOGITS, PROMPT, params))
    for guess in (None, guess_right(LOGITS), guess_sometimes(LOGITS)):
        acceptor = FromNumpy(MLXAcceptor(params, PROMPT, VOCAB))
        assert tokens_of(run_rounds(LOGITS, PROMPT, params, guess, acceptor=acceptor)) == expected


@settings(derandomize=True, deadline=None, max_examples=60)
@given(requests())
def test_rounds_equal_the_reference(request: tuple[SamplingParams, tuple[int, ...], int, int]) -> None:
    """Rounds with random widths, ties in the logits and drafts that are right half the time: guards against any
    difference in processing, ties, draws, history or positions from the specification."""
    params, prompt, vocab_size, logits_seed = request
    rng = np.random.default_rng(logits_seed)
    reference = ReferenceAcceptor(params, prompt)
    acceptor = MLXAcceptor(params, prompt, vocab_size)
    for _ in range(4):
        num_draft = int(rng.integers(0, 6))
        logits = (np.round(rng.normal(size=(num_draft + 1, vocab_size)) * 4) / 2).astype(np.float32)
        best = logits.argmax(-1)
        draft = tuple(int(best[i]) if rng.random() < 0.6 else int(rng.integers(vocab_size)) for i in range(num_draft))
        expected = reference.accept(Proposal(draft), Verdict(logits))
        assert acceptor.accept(Proposal(draft), Verdict(mx.array(logits))) == expected


def test_bfloat16_logits_are_processed_in_float32() -> None:
    """Guards against penalties and probabilities in half precision: the choice is that of the same logits widened."""
    rng = np.random.default_rng(1)
    for option in ("plain", "mixed"):
        for temperature in (0.0, 1.0):
            params = with_option(option, temperature=temperature, seed=3)
            half = mx.array(rng.normal(size=(3, VOCAB)).astype(np.float32)).astype(mx.bfloat16)
            wide = np.array(half.astype(mx.float32))
            expected = ReferenceAcceptor(params, PROMPT).accept(Proposal((1, 2)), Verdict(wide))
            assert MLXAcceptor(params, PROMPT, VOCAB).accept(Proposal((1, 2)), Verdict(half)) == expected


def test_the_nucleus_of_a_large_vocabulary() -> None:
    """Guards against the shortcut that sorts only likely tokens: flat and peaked rows against the reference."""
    rng = np.random.default_rng(3)
    for scale, top_p in ((0.01, 0.9137), (0.01, 0.0171), (3.0, 0.99913), (6.0, 0.5131)):
        params = SamplingParams(temperature=1.0, top_p=top_p, seed=9)
        logits = (rng.normal(size=(2, 50_000)) * scale).astype(np.float32)
        expected = ReferenceAcceptor(params, (1,)).accept(Proposal((0,)), Verdict(logits))
        assert MLXAcceptor(params, (1,), 50_000).accept(Proposal((0,)), Verdict(mx.array(logits))) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(bad: float, temperature: float) -> None:
    """Guards against garbage tokens from a target that overflows (float16)."""
    logits = np.zeros((1, 5), np.float32)
    logits[0, 3] = bad
    acceptor = MLXAcceptor(SamplingParams(temperature=temperature), (), 5)
    with pytest.raises(ModelError, match="not finite"):
        acceptor.accept(Proposal(), Verdict(mx.array(logits)))


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    bias: dict[int, Any] = {5: 1.0}
    with pytest.raises(ConfigError, match="token 5"):
        MLXAcceptor(SamplingParams(logit_bias=bias), (), 5)
