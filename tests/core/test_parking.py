"""A useless draft is parked and says so; a weak one is not; the text never changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dflash.core.loop import speculative_rounds
from dflash.core.parking import WINDOW, ParkingDrafter
from dflash.core.reference import ReferenceAcceptor
from dflash.core.stopping import StopRule
from dflash.types import Proposal, Round, SamplingParams
from tests.fakes import FakeDrafter, FakeTarget, Guess, guess_right, guess_wrong, random_logits, run_rounds, tokens_of

LOGITS = random_logits(3)
PROMPT = (3, 1, 4)
PARAMS = SamplingParams(max_new_tokens=200)


def right_at(share: float, seed: int = 0) -> Guess:
    """Right in a share of the positions, wrong at the others."""
    right = np.random.default_rng(seed).random(10_000) < share
    good, bad = guess_right(LOGITS), guess_wrong(LOGITS)
    return lambda prefix: good(prefix) if right[len(prefix)] else bad(prefix)


def run(guess: Guess, **options: Any) -> tuple[list[Round], ParkingDrafter, FakeDrafter]:
    """A generation of 200 tokens through a parking drafter over a fake one."""
    drafter = FakeDrafter(guess)
    parking = ParkingDrafter(drafter, **options)
    acceptor, stopping = ReferenceAcceptor(PARAMS, PROMPT), StopRule(())
    rounds = speculative_rounds(FakeTarget(LOGITS), parking, acceptor, stopping, PROMPT, max_new_tokens=200)
    return list(rounds), parking, drafter


def test_noise_is_parked_after_fifty_rounds_and_the_text_goes_on() -> None:
    """Guards against a broken draft that slows every token of a long text down, silently: after fifty rounds nothing is
    proposed or observed any more, the reason names the figures, and the text is that of plain decoding."""
    rounds, parking, drafter = run(guess_wrong(LOGITS))
    assert tokens_of(rounds) == tokens_of(run_rounds(LOGITS, PROMPT, PARAMS))
    assert [step.num_proposed > 0 for step in rounds[1:-1]] == [True] * WINDOW + [False] * (198 - WINDOW)
    assert len(drafter.budgets) == WINDOW
    assert len(drafter.observed) == len(PROMPT) + WINDOW - 1
    assert parking.reason is not None
    assert "0 of the last 50 rounds" in parking.reason


@pytest.mark.parametrize(("share", "parks"), [(1.0, False), (0.3, False), (0.0, True)])
def test_weak_drafts_go_on(share: float, parks: bool) -> None:
    """Guards against a bar by proposed tokens, which a useful draft with a wide block fails: of four proposed tokens,
    0.4 are accepted per round here."""
    rounds, parking, _ = run(right_at(share))
    assert (parking.reason is not None) == parks
    assert tokens_of(rounds) == tokens_of(run_rounds(LOGITS, PROMPT, PARAMS))


@pytest.mark.parametrize(("useful", "parks"), [(2, True), (3, False)])
def test_the_bar_is_five_per_cent_of_the_rounds(useful: int, parks: bool) -> None:
    """Guards against an alarm that is one round off: 2 of 50 are 4 %, 3 of 50 are 6 %."""
    drafter = ParkingDrafter(FakeDrafter(lambda prefix: 0))
    drafter.observe((1,), None)
    for index in range(WINDOW):
        assert drafter.reason is None
        drafter.propose(1, 2)
        drafter.observe((1, 0, 0) if index < useful else (1,), None)
    assert (drafter.reason is not None) == parks
    if drafter.reason is not None:
        assert "accepted by slot: 4%, 4%" in drafter.reason


def test_a_draft_that_breaks_later_is_parked_then() -> None:
    """Guards against an alarm that only looks at the first rounds (the context may leave what the draft knows)."""
    drafter = ParkingDrafter(FakeDrafter(lambda prefix: 0))
    drafter.observe((1,), None)
    for index in range(3 * WINDOW):
        if drafter.propose(1, 2).tokens:
            drafter.observe((1, 0) if index < WINDOW else (1,), None)
    assert drafter.reason is not None
    assert "2 of the last 50" in drafter.reason


@pytest.mark.parametrize("propose", [lambda drafter: None, lambda drafter: drafter.propose(1, 1)])
def test_rounds_without_a_proposal_do_not_count(propose: Callable[[ParkingDrafter], object]) -> None:
    """Guards against a drafter that is parked because it was not asked, or had nothing to say."""

    class Silent(FakeDrafter):
        def propose(self, anchor: int, budget: int) -> Proposal:
            return Proposal()

    drafter = ParkingDrafter(Silent(lambda prefix: 0))
    for _ in range(2 * WINDOW):
        propose(drafter)
        drafter.observe((1,), None)
    assert drafter.reason is None
