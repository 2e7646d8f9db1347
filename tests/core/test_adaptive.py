"""The controller: it never changes a text, and it does what its costs and estimates say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from scipy import stats

from dflash.core.adaptive import AdaptiveDrafter
from dflash.core.cost import CostCurve, CostTracker
from dflash.core.loop import speculative_rounds
from dflash.core.memory import Memory
from dflash.core.reference import ReferenceAcceptor, distribution
from dflash.core.stopping import StopRule
from dflash.types import CandidateTable, Proposal, Round, SamplingParams
from tests.core.machines import CURVES, DRAFT_SECONDS, Machine, SimulatedDraft, seconds_per_token
from tests.fakes import FakeDrafter, FakeTarget, LogitsOf, guess_sometimes, random_logits, run_rounds, tokens_of
from tests.options import OPTIONS, with_option

PROMPT = (3, 1, 4)
LOGITS = random_logits(1)
Trees = Literal["never", "auto", "always"]
GPU_LIKE = CostCurve((1, 64), (0,), ((1.0, 1.05),))


class TableDrafter(FakeDrafter):
    """Its guess first, the other tokens behind it, with claims that depend on the token."""

    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        chain = self.propose(anchor, budget).tokens
        ids = [[token, *((token + step) % 12 for step in range(1, count))] for token in chain]
        claims = [[math.log(0.9 - 0.05 * token)] + [math.log(0.05)] * (count - 1) for token in chain]
        return CandidateTable(ids, claims)


def jumping_clock(seed: int) -> Callable[[], float]:
    """Timings without any sense: an hour, nothing, a microsecond, backwards."""
    rng, now = np.random.default_rng(seed), 0.0

    def clock() -> float:
        nonlocal now
        now += float(rng.choice([3600.0, 0.0, 1e-6, -5.0]))
        return now

    return clock


def generate(
    drafter: AdaptiveDrafter, logits: LogitsOf, params: SamplingParams, *, trees: bool = True
) -> tuple[list[Round], FakeTarget]:
    target = FakeTarget(logits, trees=trees)
    rounds = speculative_rounds(
        target,
        drafter,
        ReferenceAcceptor(params, PROMPT),
        StopRule(params.stop_token_ids),
        PROMPT,
        max_new_tokens=params.max_new_tokens,
    )
    return list(rounds), target


@pytest.mark.parametrize("trees", ["never", "auto", "always"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("option", OPTIONS)
def test_choices_never_change_the_tokens(option: str, temperature: float, trees: Trees) -> None:
    """Fault: a cut, a branch, a copy or a skipped draft that shows in the text; also when timings are nonsense. The
    fakes check every fed row, every committed path and that the draft sees each committed token once."""
    params = with_option(option, temperature=temperature, max_new_tokens=40, seed=5)
    plain = tokens_of(run_rounds(LOGITS, PROMPT, params))
    kinds = set()
    for seed, curve in enumerate((GPU_LIKE, None)):
        draft = TableDrafter(guess_sometimes(LOGITS, seed), 5)
        memory = Memory(CostTracker(curve))
        drafter = AdaptiveDrafter(draft, memory, max_rows=9, trees=trees, clock=jumping_clock(seed))
        rounds, target = generate(drafter, LOGITS, params, trees=trees != "never")
        assert tokens_of(rounds) == plain
        assert target.committed == draft.observed == (*PROMPT, *plain[:-1])
        assert max(target.num_verified, default=0) <= 9
        kinds |= {step.reason for step in rounds}
    assert any("draft" in kind for kind in kinds)


def test_a_tree_feeds_branches_and_a_chain_does_not() -> None:
    """Fault: mode "always" never builds a tree (or "never" does), so that the test above shows nothing."""
    params = SamplingParams(max_new_tokens=60)
    shapes: dict[Trees, set[bool]] = {}
    modes: tuple[Trees, ...] = ("never", "always")
    for trees in modes:
        drafter = AdaptiveDrafter(
            TableDrafter(guess_sometimes(LOGITS), 5), Memory(CostTracker(GPU_LIKE)), max_rows=9, trees=trees,
            clock=lambda: 0.0,
        )  # fmt: skip
        rounds, _ = generate(drafter, LOGITS, params)
        shapes[trees] = {step.num_slots != step.num_proposed for step in rounds[1:]}
    assert shapes == {"never": {False}, "always": {True, False}} or shapes == {"never": {False}, "always": {True}}


def law(make: Callable[[int], AdaptiveDrafter], logits: LogitsOf, num_samples: int) -> float:
    """p-value of the first two tokens' counts over seeds against the exact law of plain sampling (25 cells)."""
    params = SamplingParams(temperature=0.9, top_p=0.95)
    counts = np.zeros((5, 5))
    for seed in range(num_samples):
        request = SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_new_tokens=4)
        text = tokens_of(generate(make(seed), logits, request)[0])
        counts[text[1], text[2]] += 1
    first = distribution(logits(PROMPT), params)
    expected = np.zeros((5, 5))
    for start in range(5):
        then = distribution(logits((*PROMPT, start)), params)
        after = np.stack([distribution(logits((*PROMPT, start, token)), params) for token in range(5)])
        expected += first[start] * then[:, None] * after
    possible = expected > 0
    assert counts[~possible].sum() == 0
    return float(stats.chisquare(counts[possible], expected[possible] * num_samples / expected[possible].sum()).pvalue)


@pytest.mark.parametrize("trees", ["never", "always"])
def test_sampled_texts_have_the_law_of_the_target(trees: Trees) -> None:
    """Chains, trees and copies under one memory that learns from request to request, 800 seeds."""
    logits = random_logits(4, vocab_size=5, scale=1.0)
    memory = Memory(CostTracker(GPU_LIKE))

    def make(seed: int) -> AdaptiveDrafter:
        draft = CheatingDrafter(seed)
        return AdaptiveDrafter(draft, memory, max_rows=6, trees=trees, clock=lambda: 0.0)

    assert law(make, logits, 800) > 0.01


class CheatingDrafter(FakeDrafter):
    """Draws its tokens, and claims much for small ones: the length is decided by what was drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__(lambda prefix: 0, 3)
        self._rng = np.random.default_rng(seed + 10**6)

    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        drawn = [int(self._rng.integers(2)) for _ in range(min(budget, 3))]
        claims = [[math.log(0.95 if token == 0 else 0.001)] for token in drawn]
        return CandidateTable([[token] for token in drawn], claims)


def test_the_two_token_counterexample() -> None:
    """Cutting on the drawn token's own claim turns (0.7, 0.3) into (0.85, 0.15) where drafts are accepted with
    min(1, p/q) and a cut proposal is a plain step (DSpark's example). Here every draw is the target's own."""

    def two(prefix: tuple[int, ...]) -> Any:
        return np.log(np.array([0.7, 0.3], np.float32))

    memory, num_samples, counts = Memory(CostTracker(GPU_LIKE)), 1_500, np.zeros(2)
    for seed in range(num_samples):
        drafter = AdaptiveDrafter(CheatingDrafter(seed), memory, max_rows=4, copies=False, clock=lambda: 0.0)
        params = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=3)
        rounds = speculative_rounds(
            FakeTarget(two), drafter, ReferenceAcceptor(params, (1, 0)), StopRule(), (1, 0), max_new_tokens=3
        )
        counts[tokens_of(list(rounds))[1]] += 1
    assert stats.chisquare(counts, np.array([0.7, 0.3]) * num_samples).pvalue > 0.01


# Simulated machines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [(0.8, 0.75, 0.7), (0.45, 0.3, 0.2), (0.25, 0.15)])
@pytest.mark.parametrize("curve", CURVES)
def test_the_rule_is_near_the_best_fixed_width_and_never_under_plain(curve: str, shares: tuple[float, ...]) -> None:
    """Fault: a rule that feeds rows which do not pay (batches, experts), or too few where they are free. Within 2 % of
    the best of all fixed widths, computed exactly, plain decoding being one of them; there is nothing to copy."""
    cost, fixed, tokens, survival = CURVES[curve], [CURVES[curve](1)], 1.0, 1.0
    for slot in range(15):
        survival *= shares[min(slot, len(shares) - 1)]
        tokens += survival
        fixed.append((cost(slot + 2) + DRAFT_SECONDS) / tokens)
    text = [int(token) for token in np.random.default_rng(0).permutation(10**6)[:700]]
    measured = CostCurve.fit({(0, rows): [cost(rows)] for rows in (1, 2, 4, 8, 16)})
    ours = []
    for seed in (1, 2):
        machine = Machine(cost)
        draft = SimulatedDraft(machine, text, shares, DRAFT_SECONDS, seed)
        drafter = AdaptiveDrafter(draft, Memory(CostTracker(measured)), max_rows=16, clock=machine)
        ours.append(seconds_per_token(machine, text, drafter.propose, drafter.observe))
    assert np.mean(ours) <= min(fixed) / 0.98


def test_a_useless_draft_costs_next_to_nothing_and_is_tried_again() -> None:
    """Fault: a bad draft makes decoding slower than plain, or is never given another chance."""
    text = list(np.random.default_rng(0).permutation(10**6)[:400])
    machine = Machine(lambda rows: 1 + 0.13 * (rows - 1))
    draft = SimulatedDraft(machine, text, (0.0,), 0.15)
    drafter = AdaptiveDrafter(draft, Memory(), max_rows=16, clock=machine)  # nothing measured
    seconds = seconds_per_token(machine, text, drafter.propose, drafter.observe)
    assert seconds < 1.03
    assert 8 <= draft.num_asked <= 32


def test_costs_at_depth_narrow_the_width() -> None:
    """Fault: a width chosen by shallow costs is kept in a long context, where rows cost far more."""
    curve = CostCurve((1, 16), (0, 4000), ((1.0, 1.3), (1.1, 9.0)))
    widths = []
    for depth in (10, 4000):
        machine = Machine(lambda rows: 1.0)
        text = list(np.random.default_rng(0).permutation(10**6)[: depth + 60])
        draft = SimulatedDraft(machine, text, (0.7,), 0.0)
        drafter = AdaptiveDrafter(draft, Memory(CostTracker(curve)), max_rows=16, clock=machine)
        drafter.observe(text[:depth], None)
        widths.append(np.mean([len(drafter.propose(text[depth], 40).tokens) for _ in range(20)]))
    assert widths[0] > 2 * widths[1]


def test_two_regimes_are_told_apart() -> None:
    """Fault: one cap for a whole answer: copied passages want long proposals, the rest short ones."""
    rng = np.random.default_rng(0)
    quoted = [int(token) for token in rng.permutation(5_000)[:60]]
    text = quoted + [int(token) for token in rng.permutation(90_000)[:80] + 10_000] + quoted + quoted
    machine = Machine(lambda rows: 1 + 0.13 * (rows - 1))
    drafter = AdaptiveDrafter(None, Memory(), max_rows=16, clock=machine)
    reasons = []

    def propose(anchor: int, budget: int) -> Proposal:
        proposal = drafter.propose(anchor, budget)
        reasons.append((proposal.reason, len(proposal.tokens)))
        return proposal

    seconds_per_token(machine, text, propose, drafter.observe)
    assert reasons[:100] == [("plain", 0)] * 100
    assert max(length for _, length in reasons[100:]) == 15
    assert machine.now < 200


@pytest.mark.parametrize("trees", ["never", "auto"])
def test_steady_rounds_repeat_whatever_the_clock_says(trees: Trees) -> None:
    """Guards against a clock that finds its way into decisions: acceptance would differ between runs. Costs
    that follow the clock must, over the same requests, lead elsewhere, or this shows nothing."""

    def all_rounds(clock: Callable[[], float], *, steady: bool) -> list[list[int]]:
        memory = Memory(CostTracker(GPU_LIKE, CostCurve((1,), (0,), ((0.3,),))))
        lengths = []
        for _ in range(4):
            drafter = AdaptiveDrafter(
                TableDrafter(guess_sometimes(LOGITS, 2)), memory, max_rows=8, trees=trees, clock=clock, steady=steady
            )
            rounds, _ = generate(drafter, LOGITS, SamplingParams(max_new_tokens=60))
            lengths.append([one.num_proposed for one in rounds])
        return lengths

    clocks = [jumping_clock(seed) for seed in (1, 2, 3)]
    first, second, third = (all_rounds(clock, steady=True) for clock in clocks)
    assert first == second == third
    assert any(all_rounds(clock, steady=False) != first for clock in clocks)
