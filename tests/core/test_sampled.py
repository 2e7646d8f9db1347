"""Drawn proposals: the target's law stays, nothing anticipates, and the better of drawing and first choices is used."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dflash.core.adaptive import AdaptiveDrafter
from dflash.core.cost import CostCurve, CostTracker
from dflash.core.drafting import CopyDrafter, make_session
from dflash.core.draws import draft_generator, uniforms
from dflash.core.loop import speculative_rounds
from dflash.core.memory import Memory
from dflash.core.reference import ReferenceAcceptor
from dflash.core.sampled import LEAST_ROWS, MARGIN, THETAS, Agreements, draft_probs
from dflash.core.stopping import StopRule
from dflash.types import CandidateTable, Drafting, Mode, SamplingParams
from tests.core.test_adaptive import law
from tests.fakes import FakeDrafter, FakeTarget, LogitsOf, random_logits, tokens_of

FREE_ROWS = CostCurve((1, 64), (0,), ((1.0, 1.01),))


class Distribution(FakeDrafter):
    """The target's own logits behind the anchor for every slot, scaled: right for the first, a guess for the others."""

    def __init__(self, logits: LogitsOf, scale: float = 1.0) -> None:
        super().__init__(lambda prefix: 0, 3)
        self._logits, self._scale = logits, scale

    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        row = self._logits((*self.observed, anchor)).astype(np.float64) * self._scale
        row -= np.log(np.exp(row).sum())
        order = np.argsort(-row)[:count]
        slots = min(budget, 3)
        return CandidateTable([order.tolist()] * slots, [row[order].tolist()] * slots)


class Stubborn(Agreements):
    """Draws every slot at temperature 1, however far q is from p, so that tokens are rejected and replaced often."""

    def best(self, slot: int) -> tuple[float, float] | None:
        return 1.0, 0.9


def taught(*, stubborn: bool = False) -> Memory:
    """A memory in which drawing has been found better in every slot."""
    memory = Memory(CostTracker(FREE_ROWS, CostCurve((1,), (0,), ((0.001,),))))
    if stubborn:
        memory.at(1.0).agreements = Stubborn()
    for slot in range(3):
        for _ in range(LEAST_ROWS):
            memory.at(1.0).agreements.add(slot, [math.log(0.5), math.log(0.5)], [0.5, 0.5])
    return memory


def drawing(draft: Distribution, memory: Memory, seed: int, *, max_rows: int) -> AdaptiveDrafter:
    """A drafter that may draw at temperature 1, by costs that no clock changes."""
    return AdaptiveDrafter(
        draft,
        memory,
        max_rows=max_rows,
        copies=False,
        temperature=1.0,
        generator=draft_generator(seed),
        clock=lambda: 0.0,
    )


@pytest.mark.parametrize("stubborn", [True, False])
def test_drawn_proposals_have_the_law_of_plain_sampling(stubborn: bool) -> None:
    """Fault: q is not what was drawn from, the residual is wrong, streams are shared, or lengths follow the draws.
    1,000 seeds, temperature 0.9, top-p, one memory that goes on learning; `stubborn`: from a q far from p."""
    logits = random_logits(4, vocab_size=5, scale=1.0)
    memory, reasons = taught(stubborn=stubborn), Counter[str]()

    def make(seed: int) -> AdaptiveDrafter:
        drafter = drawing(Distribution(logits, 3.0 if stubborn else 1.0), memory, seed, max_rows=6)
        propose = drafter.propose

        def noting(anchor: int, budget: int) -> Any:
            proposal = propose(anchor, budget)
            reasons[proposal.reason] += 1
            return proposal

        drafter.propose = noting  # type: ignore[method-assign]
        return drafter

    assert law(make, logits, 1_000) > 0.01
    assert reasons["draft, drawn"] > 300, reasons


@pytest.mark.parametrize("stubborn", [True, False])
def test_the_two_token_counterexample(stubborn: bool) -> None:
    """Fault: whether a slot is fed depends on what was drawn for it (DSpark's example turns 0.7 and 0.3 into 0.85 and
    0.15). The draft is sure of one token and unsure of the other, both right for half of the time."""

    def two(prefix: tuple[int, ...]) -> Any:
        return np.log(np.array([0.7, 0.3], np.float32))

    memory, num_samples = taught(stubborn=stubborn), 1_000
    counts = np.zeros((2, 2))
    for seed in range(num_samples):
        drafter = drawing(Distribution(two, 2.0 if stubborn else 0.5), memory, seed, max_rows=4)
        params = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=4)
        rounds = speculative_rounds(
            FakeTarget(two), drafter, ReferenceAcceptor(params, (1, 0)), StopRule(), (1, 0), max_new_tokens=4
        )
        text = tokens_of(list(rounds))
        counts[text[1], text[2]] += 1
    expected = np.outer([0.7, 0.3], [0.7, 0.3]) * num_samples
    assert stats.chisquare(counts.ravel(), expected.ravel()).pvalue > 0.01


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_the_better_policy_is_used_at_any_scale_of_the_logits(scale: float) -> None:
    """Fault: a draft whose logits are scaled wrongly (a missing multiplier) is drawn from all the same. Acceptance of
    what is chosen is within 2 % of the best there is, apart from the margin that drawing must win by."""
    rng = np.random.default_rng(0)
    agreements, rows = Agreements(), []
    for _ in range(200):
        logits = rng.normal(size=16) * 1.5
        p = np.exp(logits) / np.exp(logits).sum()
        order = np.argsort(-p)
        q = np.exp(scale * logits) / np.exp(scale * logits).sum()
        rows.append((np.log(q[order]).tolist(), p[order].tolist()))
        agreements.add(0, *rows[-1])
    best = agreements.best(0)
    chosen = agreements.first_choice(0) if best is None else best[1]
    assert chosen is not None
    possible = [float(np.mean([p[0] for _, p in rows]))]
    for theta in THETAS:
        drawn = [np.minimum(p, draft_probs(range(16), q, theta).probs).sum() for q, p in rows]
        possible.append(float(np.mean(drawn)))
    assert chosen >= 0.98 * max(possible) / MARGIN
    if best is not None:
        assert best[0] == THETAS[int(np.argmax(possible[1:]))]
    assert best is not None
    assert best[0] == {0.25: 0.25, 1.0: 1.0, 4.0: 1.5}[scale]


@pytest.mark.parametrize("mode", ["exact", "auto", "fast"])
def test_only_mode_fast_draws(mode: Mode) -> None:
    """Fault: a seed's text changes where identity was promised; or mode "fast" never draws."""
    logits = random_logits(4, vocab_size=5, scale=1.0)

    class Shared:
        def session(self) -> Distribution:
            return Distribution(logits)

    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=60)
    found = {}
    for draws in (True, False):
        drafter = make_session(
            Shared(),
            Drafting(mode=mode, draws=draws, copies=False),
            taught(),
            max_rows=6,
            supports_trees=False,
            params=params,
            clock=lambda: 0.0,
        )
        prompt = (3, 1, 4)
        acceptor = ReferenceAcceptor(params, prompt)
        rounds = list(speculative_rounds(FakeTarget(logits), drafter, acceptor, StopRule(), prompt, max_new_tokens=60))
        found[draws] = [step.reason == "draft, drawn" for step in rounds]
        assert bool(drafter.notes) == any(found[draws])
    assert any(found[True]) == (mode == "fast")
    assert not any(found[False])


def test_the_streams_are_apart() -> None:
    """Fault: the draft draws the target's own numbers, so that it guesses right for the wrong reason."""
    words = [uniforms(7, 0, 500, word) for word in (0, 1)]
    words.append(draft_generator(7).random(500))
    assert np.abs(np.corrcoef(words) - np.eye(3)).max() < 0.15
    assert make_session(CopyDrafter(), Drafting(mode="fast"), Memory(), max_rows=4, supports_trees=True).notes == ()
