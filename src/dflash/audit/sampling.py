"""Do sampled tokens have the target's law? A chi-square test of repeated runs against the bare model's probabilities.

Each sampled token is turned into a number that is uniform in [0, 1) if the token really has the law p: its place in the
cumulative distribution, tokens in order of falling probability, with an independent draw inside the token's own piece.
Favouring the draft's guesses, which are mostly probable tokens, fills the first bins. So tokens after all kinds of
prefixes go into one test. Framework-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash.audit.forms import Form
from dflash.audit.oracle import Oracle
from dflash.core.engine import Engine
from dflash.core.reference import FloatArray, distribution
from dflash.types import Proposal, SamplingParams, Verdict

NUM_BINS = 11
"""Ten degrees of freedom: an even number has a closed form."""
LEAST_P = 1e-4
"""Smaller p-values count as a fault: by luck alone one audit of ten thousand. Seeds are fixed."""
TOKENS_PER_RUN = 4


@dataclass(frozen=True)
class LawTest:
    """One chi-square test."""

    num_runs: int
    num_tokens: int
    chi_square: float
    p_value: float

    @property
    def passed(self) -> bool:
        """Whether luck explains what was seen."""
        return self.p_value >= LEAST_P


def law_test(places: Sequence[float], num_runs: int) -> LawTest:
    """Are these numbers in [0, 1) uniform?"""
    counts = np.histogram(places, bins=NUM_BINS, range=(0.0, 1.0))[0]
    expected = len(places) / NUM_BINS
    chi_square = float(((counts - expected) ** 2).sum() / expected) if places else 0.0
    return LawTest(num_runs, len(places), chi_square, survival(chi_square, NUM_BINS - 1))


def survival(chi_square: float, degrees: int) -> float:
    """P(chi-square of `degrees` (even) degrees of freedom >= chi_square)."""
    assert degrees % 2 == 0
    half = chi_square / 2
    return math.exp(-half) * sum(half**index / math.factorial(index) for index in range(degrees // 2))


def place_of(token: int, probs: FloatArray, inside: float) -> float:
    """Where `token` lies in the cumulative distribution `probs` [V] with falling probabilities; `inside` in [0, 1)
    picks the place inside its own piece."""
    p = float(probs[token])
    before = float(probs[probs > p].sum(dtype=np.float64) + probs[:token][probs[:token] == p].sum(dtype=np.float64))
    return min(before + inside * p, float(np.nextafter(1.0, 0.0)))


def runs_from_the_start(
    forms: Sequence[Form], oracle: Oracle, prompt_ids: Sequence[int], num_runs: int, tick: Callable[[], None]
) -> LawTest:
    """Whole generations of a few tokens, one seed each: prefill, draft, verify, accept, commit and all. The forms take
    turns."""
    inside = np.random.default_rng(0)
    places: list[float] = []
    for seed in range(num_runs):
        params = SamplingParams(max_new_tokens=TOKENS_PER_RUN, temperature=1.0, seed=seed, ignore_eos=True)
        form = forms[seed % len(forms)]
        tokens = form.engine.generate(prompt_ids=prompt_ids, params=params, drafting=form.drafting).token_ids
        rows = oracle.logits([*prompt_ids, *tokens[:-1]], len(tokens))
        for token, row in zip(tokens, rows, strict=True):
            places.append(place_of(token, distribution(row, params), float(inside.random())))
        tick()
    return law_test(places, num_runs)


def decisions_on_one_block(engine: Engine, oracle: Oracle, prompt_ids: Sequence[int], num_runs: int) -> LawTest:
    """Many acceptance decisions on one verified block, whose guesses are the target's likeliest tokens."""
    anchor_and_guesses = engine.generate(
        prompt_ids=prompt_ids, params=SamplingParams(max_new_tokens=TOKENS_PER_RUN, ignore_eos=True), use_draft=False
    ).token_ids
    anchor, guesses = anchor_and_guesses[0], tuple(anchor_and_guesses[1:])
    session = engine.target.session(features=False)
    try:
        session.prefill(prompt_ids)
        verdict: Verdict = session.verify(anchor, Proposal(guesses))
        rows = oracle.logits([*prompt_ids, anchor, *guesses], len(guesses) + 1)
        prefix = [*prompt_ids, anchor]
        inside: NDArray[np.float64] = np.random.default_rng(1).random((num_runs, len(rows)))
        places: list[float] = []
        for seed in range(num_runs):
            params = SamplingParams(temperature=1.0, seed=seed)
            decided = engine.acceptor(params, prefix).accept(Proposal(guesses), verdict)
            tokens = [*guesses[: decided.num_accepted], decided.next_token]
            for index, token in enumerate(tokens):
                places.append(place_of(token, distribution(rows[index], params), float(inside[seed, index])))
    finally:
        session.close()
    return law_test(places, num_runs)
