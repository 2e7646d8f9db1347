"""The torch acceptor against the NumPy specification, row by row (CPU) and all rows at once (other devices)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.backends.torch.sampling import TorchAcceptor
from dflash.core.reference import ReferenceAcceptor
from dflash.errors import ConfigError, ModelError
from dflash.types import Acceptance, DrawnFrom, Proposal, SamplingParams, Verdict
from tests.fakes import VOCAB, LogitsOf, guess_right, guess_sometimes, guess_wrong, random_logits, run_rounds, tokens_of
from tests.options import OPTIONS, with_option

PROMPT = (3, 1, 4, 1, 5)
LOGITS = random_logits(2)


class FromNumpy:
    """Lets the torch acceptor judge the fakes' NumPy logits."""

    def __init__(self, acceptor: TorchAcceptor, dtype: torch.dtype = torch.float32) -> None:
        self._acceptor = acceptor
        self._dtype = dtype

    def accept(self, proposal: Proposal, verdict: Verdict) -> Acceptance:
        return self._acceptor.accept(proposal, Verdict(torch.from_numpy(verdict.logits).to(self._dtype)))


def torch_tokens(
    params: SamplingParams,
    guess: Any,
    *,
    row_by_row: bool,
    dtype: torch.dtype = torch.float32,
    logits: LogitsOf = LOGITS,
) -> list[int]:
    acceptor = FromNumpy(TorchAcceptor(params, PROMPT, VOCAB, row_by_row=row_by_row), dtype)
    return tokens_of(run_rounds(logits, PROMPT, params, guess, acceptor=acceptor))


@pytest.mark.parametrize("row_by_row", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_gives_the_reference_text(option: str, temperature: float, row_by_row: bool) -> None:
    """Guards against options that are skipped, misplaced or computed on the wrong prefix."""
    params = with_option(option, temperature=temperature, max_new_tokens=40, seed=5)
    expected = tokens_of(run_rounds(LOGITS, PROMPT, params))
    for guess in (None, guess_right(LOGITS), guess_sometimes(LOGITS), guess_wrong(LOGITS)):
        assert torch_tokens(params, guess, row_by_row=row_by_row) == expected


@st.composite
def requests(draw: st.DrawFn) -> tuple[SamplingParams, tuple[int, ...], int, int]:
    """Random parameters, prompt, vocabulary size and logits seed. The filters' thresholds are odd numbers, so
    that no sum of probabilities falls on one within rounding."""
    vocab_size = draw(st.integers(2, 40))
    token = st.integers(0, vocab_size - 1)
    bias = st.sampled_from([-1.0, 0.5, 2.0])
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 60])),
        top_p=draw(st.sampled_from([1.0, 0.9137, 0.5131, 0.0171])),
        min_p=draw(st.sampled_from([0.0, 0.0173, 0.3371])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 1.1, -0.6])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        logit_bias=draw(st.dictionaries(token, bias, max_size=3)),
        seed=draw(st.integers(0, 2**63 - 1)),
    )
    return params, tuple(draw(st.lists(token, max_size=6))), vocab_size, draw(st.integers(0, 2**32 - 1))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(requests(), st.booleans())
def test_rounds_equal_the_reference(
    request: tuple[SamplingParams, tuple[int, ...], int, int], row_by_row: bool
) -> None:
    """Six rounds with random widths, ties in the logits and drafts that are right half the time: guards against
    any difference in processing, ties, draws, history or positions between the fast path and the specification."""
    params, prompt, vocab_size, logits_seed = request
    rng = np.random.default_rng(logits_seed)
    reference = ReferenceAcceptor(params, prompt)
    acceptor = TorchAcceptor(params, prompt, vocab_size, row_by_row=row_by_row)
    for _ in range(6):
        num_draft = int(rng.integers(0, 6))
        logits = (np.round(rng.normal(size=(num_draft + 1, vocab_size)) * 4) / 2).astype(np.float32)
        best = logits.argmax(-1)
        draft = tuple(int(best[i]) if rng.random() < 0.6 else int(rng.integers(vocab_size)) for i in range(num_draft))
        expected = reference.accept(Proposal(draft), Verdict(logits))
        assert acceptor.accept(Proposal(draft), Verdict(torch.from_numpy(logits))) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row_by_row", [True, False])
def test_near_ties_on_a_branch_are_left_to_the_next_round(row_by_row: bool, dtype: torch.dtype) -> None:
    """Fault: a row of a branch, whose last bits may differ from a chain's, decides a near-tie; or rows that cannot
    differ (the first branch) are given up, too."""
    tree = Proposal.tree((1, 2, 5, 6, 7), (0, 1, 0, 3, 4))  # the anchor's children: 1 (then 2) and 5 (then 6, 7)
    clear, near = 1.0, 1e-6

    def accepted(first: int, margins: dict[int, float]) -> Acceptance:
        logits = torch.zeros(6, 9)
        for row, token in enumerate((first, 2, 3, 6, 7, 8)):
            logits[row, token] = 16.0
            logits[row, 0] = 16.0 - margins.get(row, clear)
        logits[0, first] = 17.0
        acceptor = TorchAcceptor(SamplingParams(), PROMPT, 9, row_by_row=row_by_row)
        return acceptor.accept(tree, Verdict(logits.to(dtype)))

    assert accepted(5, {}) == Acceptance((0, 3, 4, 5), 8)
    if dtype == torch.bfloat16:  # 16 and 16 - 1e-6 are the same number: the first of equals would be said
        assert accepted(5, {4: near}).path[-1] == 3
        return
    assert accepted(5, {5: near}) == Acceptance((0, 3, 4), 7)
    assert accepted(5, {3: near}) == Acceptance((0,), 5)
    assert accepted(1, {1: near, 2: near}) == Acceptance((0, 1, 2), 3)


@pytest.mark.parametrize("computed_in", [None, torch.float32, torch.bfloat16])
def test_near_ties_go_by_what_computed_the_logits(computed_in: torch.dtype | None) -> None:
    """Fault: a model in bfloat16 that hands out float32 logits is judged as if it had computed in float32."""
    tree = Proposal.tree((1, 2), (0, 0))
    logits = torch.zeros(3, 9)
    logits[0, 2] = 17.0
    logits[2, 3], logits[2, 4] = 16.0, 15.99
    acceptance = TorchAcceptor(SamplingParams(), PROMPT, 9, computed_in=computed_in).accept(tree, Verdict(logits))
    assert acceptance == (Acceptance((0,), 2) if computed_in == torch.bfloat16 else Acceptance((0, 2), 3))


@pytest.mark.parametrize("row_by_row", [True, False])
@pytest.mark.parametrize("option", ["plain", "mixed"])
def test_drawn_chains_and_chances_equal_the_reference(option: str, row_by_row: bool) -> None:
    """Fault: the fast path accepts by another rule, draws another replacement, or tells other probabilities. Chains of
    drawn tokens and point masses, 300 rounds."""
    rng = np.random.default_rng(1)
    params = with_option(option, temperature=0.9, seed=4)
    reference = ReferenceAcceptor(params, PROMPT)
    acceptor = TorchAcceptor(params, PROMPT, VOCAB, row_by_row=row_by_row)
    lengths = set()
    for _ in range(300):
        logits = rng.normal(size=(4, VOCAB)).astype(np.float32) * 2
        drawn_from, tokens = [], []
        for row in range(3):
            ids = rng.permutation(VOCAB)[:5]
            probs = np.exp(logits[row, ids].astype(np.float64))
            probs /= probs.sum()
            drawn = rng.random() < 0.7
            tokens.append(int(rng.choice(ids, p=probs)))
            drawn_from.append(DrawnFrom(tuple(ids.tolist()), tuple(probs.tolist())) if drawn else None)
        proposal = Proposal(tuple(tokens), drawn_from=tuple(drawn_from), asked=((0, 3), (1,), (), (2, 4, 6)))
        expected = reference.accept(proposal, Verdict(logits))
        actual = acceptor.accept(proposal, Verdict(torch.from_numpy(logits)))
        assert actual == expected
        for ours, theirs in zip(actual.chances, expected.chances, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6)
        lengths.add(actual.num_accepted)
    assert lengths == {0, 1, 2, 3}


@pytest.mark.parametrize("row_by_row", [True, False])
def test_bfloat16_logits_are_processed_in_float32(row_by_row: bool) -> None:
    """Guards against penalties and probabilities in half precision: the text is that of the same logits widened."""

    def rounded(prefix: tuple[int, ...]) -> Any:
        return torch.from_numpy(LOGITS(prefix)).bfloat16().float().numpy()

    for option in ("plain", "mixed"):
        for temperature in (0.0, 1.0):
            params = with_option(option, temperature=temperature, max_new_tokens=40)
            expected = tokens_of(run_rounds(rounded, PROMPT, params))
            guess = guess_sometimes(rounded)
            actual = torch_tokens(params, guess, row_by_row=row_by_row, dtype=torch.bfloat16, logits=rounded)
            assert actual == expected


@pytest.mark.parametrize("row_by_row", [True, False])
def test_greedy_takes_the_first_of_equals(row_by_row: bool) -> None:
    """Guards against plain and speculative runs that break ties differently."""
    logits = torch.zeros(3, 7)
    logits[:, [2, 5]] = 1
    acceptor = TorchAcceptor(SamplingParams(), (), 7, row_by_row=row_by_row)
    assert acceptor.accept(Proposal((2, 5)), Verdict(logits)) == Acceptance.chain(1, 2)


@pytest.mark.parametrize("row_by_row", [True, False])
def test_the_nucleus_of_a_large_vocabulary(row_by_row: bool) -> None:
    """Guards against the shortcut that sorts only likely tokens: 50 000 flat and peaked rows against the reference."""
    rng = np.random.default_rng(3)
    for scale, top_p in ((0.01, 0.9137), (0.01, 0.0171), (3.0, 0.99913), (6.0, 0.5131)):
        params = SamplingParams(temperature=1.0, top_p=top_p, seed=9)
        logits = (rng.normal(size=(2, 50_000)) * scale).astype(np.float32)
        expected = ReferenceAcceptor(params, (1,)).accept(Proposal((0,)), Verdict(logits))
        acceptor = TorchAcceptor(params, (1,), 50_000, row_by_row=row_by_row)
        assert acceptor.accept(Proposal((0,)), Verdict(torch.from_numpy(logits))) == expected


@pytest.mark.parametrize("row_by_row", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(bad: float, temperature: float, row_by_row: bool) -> None:
    """Guards against garbage tokens from a target that overflows (float16)."""
    logits = torch.zeros(1, 5)
    logits[0, 3] = bad
    acceptor = TorchAcceptor(SamplingParams(temperature=temperature), (), 5, row_by_row=row_by_row)
    with pytest.raises(ModelError, match="not finite"):
        acceptor.accept(Proposal(), Verdict(logits))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banning_every_token_is_an_error(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(5), float("-inf")))
    with pytest.raises(ModelError, match="leave at least one"):
        TorchAcceptor(params, (), 5).accept(Proposal(), Verdict(torch.zeros(1, 5)))


@pytest.mark.parametrize(
    ("bias", "message"),
    [({5: 1.0}, "token 5"), ({-1: 1.0}, "token -1"), ({1: float("nan")}, "nan"), ({1: float("inf")}, "inf")],
)
def test_a_bias_that_cannot_be_applied_is_refused(bias: dict[int, float], message: str) -> None:
    """Guards against wrap-around of negative ids and against probabilities of NaN."""
    with pytest.raises(ConfigError, match=message):
        TorchAcceptor(SamplingParams(logit_bias=bias), (), 5)


def test_logits_are_left_alone() -> None:
    """Guards against in-place processing of a buffer that belongs to the target."""
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    for temperature in (0.0, 1.0):
        TorchAcceptor(with_option("mixed", temperature=temperature), PROMPT, VOCAB).accept(
            Proposal((1, 2)), Verdict(logits)
        )
    assert torch.equal(logits, before)


class Elsewhere:
    """Logits on a device that this machine does not have: all that may be done with them is to fetch them."""

    def __init__(self, logits: Any) -> None:
        self._logits = torch.from_numpy(logits)

    def detach(self) -> Elsewhere:
        return self

    def to(self, device: torch.device) -> torch.Tensor:
        assert device == torch.device("cpu")
        return self._logits


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_devices_without_float64_are_judged_on_the_cpu(option: str, temperature: float) -> None:
    """Guards against float64, or any tensor at all, on Apple's GPUs, which would end in a traceback there."""
    params = with_option(option, temperature=temperature, max_new_tokens=20)
    acceptor, reference = TorchAcceptor(params, PROMPT, VOCAB, "mps"), ReferenceAcceptor(params, PROMPT)
    rng = np.random.default_rng(1)
    for _ in range(4):
        logits = rng.normal(size=(4, VOCAB)).astype(np.float32)
        proposal = Proposal(tuple(int(token) for token in logits.argmax(-1)[:3]))
        assert acceptor.accept(proposal, Verdict(Elsewhere(logits))) == reference.accept(proposal, Verdict(logits))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cuda_gives_the_reference_text(option: str, temperature: float) -> None:
    """Guards against a device path that differs from the one tested on the CPU."""
    params = with_option(option, temperature=temperature, max_new_tokens=40, seed=5)
    acceptor = TorchAcceptor(params, PROMPT, VOCAB, "cuda")

    class OnDevice:
        def accept(self, proposal: Proposal, verdict: Verdict) -> Acceptance:
            return acceptor.accept(proposal, Verdict(torch.from_numpy(verdict.logits).cuda()))

    speculative = run_rounds(LOGITS, PROMPT, params, guess_sometimes(LOGITS), acceptor=OnDevice())
    assert tokens_of(speculative) == tokens_of(run_rounds(LOGITS, PROMPT, params))
