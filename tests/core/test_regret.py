"""Never slower: whatever a draft claims, costs and guesses, a request loses no more than the ledger lets it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from dflash.core.adaptive import AdaptiveDrafter
from dflash.core.cost import CostCurve, CostTracker
from dflash.core.ledger import ALLOWANCE, FIRST, MOST, RATE, Ledger
from dflash.core.memory import Memory
from dflash.types import CandidateTable, Proposal
from tests.core.machines import CURVES, Machine, seconds_per_token

NUM_TOKENS = 128
FRESH = [int(token) for token in np.random.default_rng(0).permutation(10**6)[: NUM_TOKENS + 1]]
"""Nothing repeats."""
MISLEADING = [(1, 2, 3, 4)[step % 4] if step % 5 else 1_000 + step for step in range(NUM_TOKENS + 1)]
"""Every few tokens seem to repeat, and then do not go on as before."""


@dataclass
class BadDraft:
    """Wrong in every slot, or from some token on; `claim` is what it says of its chances."""

    machine: Machine
    claim: float
    seconds: float
    good_until: int = 0
    text: list[int] = field(default_factory=list)
    max_proposal: int = 7
    num_asked: int = 0
    _num_seen: int = 0

    def observe(self, token_ids: Any, features: Any) -> None:
        self._num_seen += len(token_ids)

    def propose(self, anchor: int, budget: int) -> Proposal:
        raise NotImplementedError

    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        self.machine.now += self.seconds
        self.num_asked += 1
        right = self.text[self._num_seen + 1 :] if self._num_seen < self.good_until else []
        first = [right[slot] if slot < len(right) else -1 for slot in range(min(budget, self.max_proposal))]
        return CandidateTable(
            [[token, *range(-2, -1 - count, -1)] for token in first],
            [[math.log(self.claim)] + [math.log(0.01)] * (count - 1)] * len(first),
        )


def slowdown(
    cost: Callable[[int], float],
    claim: float,
    seconds: float,
    text: list[int],
    *,
    memory: Memory | None = None,
    good: int = 0,
) -> float:
    """Time over that of plain decoding."""
    machine = Machine(cost)
    measured = CostCurve.fit({(0, rows): [cost(rows)] for rows in (1, 2, 4, 8, 16)})
    memory = memory or Memory(CostTracker(measured, CostCurve((1,), (0,), ((seconds,),))))
    draft = BadDraft(machine, claim, seconds, good, text)
    drafter = AdaptiveDrafter(draft, memory, max_rows=16, clock=machine)
    return seconds_per_token(machine, text, drafter.propose, drafter.observe) / cost(1)


@pytest.mark.parametrize("text", [FRESH, MISLEADING], ids=["fresh", "misleading"])
@pytest.mark.parametrize("seconds", [0.02, 0.15, 2.5])
@pytest.mark.parametrize("claim", [0.5, 0.99])
@pytest.mark.parametrize("curve", CURVES)
def test_no_draft_makes_128_tokens_slower_by_more_than_three_per_cent(
    curve: str, claim: float, seconds: float, text: list[int]
) -> None:
    """Fault: trials, probes, rows fed on a lie or on repetitions that do not hold add up on one short answer. Each is
    the first answer of its engine, which knows nothing of the draft; the probes' time is included."""
    assert slowdown(CURVES[curve], claim, seconds, text) <= 1.03


@pytest.mark.parametrize("curve", CURVES)
def test_what_was_learned_makes_the_next_answers_cheaper(curve: str) -> None:
    """Fault: every request pays for learning anew that the draft is of no use."""
    cost = CURVES[curve]
    measured = CostCurve.fit({(0, rows): [cost(rows)] for rows in (1, 2, 4, 8, 16)})
    memory = Memory(CostTracker(measured, CostCurve((1,), (0,), ((0.15,),))))
    ratios = [slowdown(cost, 0.5, 0.15, FRESH, memory=memory) for _ in range(7)]
    assert max(ratios) <= 1.03
    assert np.mean(ratios[3:]) <= 1.006


def test_a_draft_that_turns_bad_costs_what_it_had_gained_at_most() -> None:
    """Fault: a draft that was good for half of the answer is trusted for the rest of it."""
    cost = CURVES["linear (CPU)"]
    assert slowdown(cost, 0.9, 0.15, FRESH, good=64) < 0.8
    perfect = slowdown(cost, 0.9, 0.15, FRESH, good=NUM_TOKENS)
    assert perfect < 0.4


def test_a_dear_draft_that_pays_is_found_and_used() -> None:
    """Fault: the bound keeps a draft whose first try costs more than may be lost (a language model of two and a half
    plain steps for seven right tokens) from ever being tried."""
    assert slowdown(CURVES["flat to 64 (GPU)"], 0.9, 2.5, FRESH, good=NUM_TOKENS) < 0.75


def test_the_ledger() -> None:
    """Fault: a bet that would leave less than nothing is allowed, or gains pile up without end."""
    ledger = Ledger()
    assert ledger.limit == FIRST
    ledger.book(1, 1.5)
    assert ledger.limit == pytest.approx(ALLOWANCE - 0.5 + RATE)
    ledger.book(1, 4)
    assert ledger.limit < 0
    ledger.book(1_000, 1)
    assert ledger.limit == MOST
