"""The loop over fakes: what is emitted, what is committed, and what a round reports."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from dflash.core.loop import speculative_rounds
from dflash.core.reference import ReferenceAcceptor
from dflash.core.stopping import StopRule
from dflash.errors import ConfigError, PromptError
from dflash.types import Proposal, Round, SamplingParams, Stats, Verdict
from tests.fakes import (
    FakeAcceptor,
    FakeDrafter,
    FakeTarget,
    Guess,
    guess_right,
    guess_sometimes,
    guess_wrong,
    random_logits,
    run_rounds,
    scripted_logits,
    tokens_of,
)

PROMPT = (3, 1, 4)
SCRIPT = (1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3)
LOGITS = scripted_logits(PROMPT, SCRIPT)
GREEDY = SamplingParams(max_new_tokens=20)
GUESSES = {"never": guess_wrong, "sometimes": guess_sometimes, "always": guess_right}


def generation(
    guess: Guess | None, stop: StopRule | None = None, limit: int = 20, max_length: int = 10_000
) -> tuple[list[Round], FakeTarget, FakeDrafter | None]:
    target = FakeTarget(LOGITS, max_length)
    drafter = None if guess is None else FakeDrafter(guess)
    acceptor = ReferenceAcceptor(GREEDY, PROMPT)
    rounds = speculative_rounds(target, drafter, acceptor, stop or StopRule(), PROMPT, max_new_tokens=limit)
    return list(rounds), target, drafter


@pytest.mark.parametrize("kind", GUESSES)
@pytest.mark.parametrize("width", [None, 1, 2, 3, 5, 99])
def test_drafts_never_change_the_tokens(kind: str, width: int | None) -> None:
    """Guards against kept rejected rows: the next token depends on the last two, so a wrong row shows."""
    logits = random_logits(1)
    plain = run_rounds(logits, PROMPT, GREEDY)
    speculative = run_rounds(logits, PROMPT, GREEDY, GUESSES[kind](logits), width=width)
    assert tokens_of(speculative) == tokens_of(plain)
    assert all(len(step.tokens) == 1 and step.num_proposed == 0 for step in plain)


def test_acceptance_patterns_have_the_expected_rounds() -> None:
    """Guards against fakes that never exercise what their name says, and against miscounted rounds."""
    always, _, _ = generation(guess_right(LOGITS), limit=16)
    assert [len(step.tokens) for step in always] == [1, 5, 5, 5]
    assert [step.num_accepted for step in always] == [0, 4, 4, 4]
    never, _, _ = generation(guess_wrong(LOGITS), limit=16)
    assert [len(step.tokens) for step in never] == [1] * 16
    sometimes, _, _ = generation(guess_sometimes(LOGITS), limit=16)
    assert 4 < len(sometimes) < 16


@pytest.mark.parametrize("limit", range(1, 13))
@pytest.mark.parametrize("kind", ["never", "always"])
def test_limit_at_every_offset_of_the_block(limit: int, kind: str) -> None:
    """Guards against tokens past the limit and drafts that could never be emitted."""
    rounds, target, drafter = generation(GUESSES[kind](LOGITS), limit=limit)
    assert tuple(tokens_of(rounds)) == SCRIPT[:limit]
    assert [step.finish_reason for step in rounds] == [None] * (len(rounds) - 1) + ["length"]
    num_emitted = 1
    for step in rounds[1:]:
        assert step.num_proposed == min(4, limit - num_emitted - 1)
        num_emitted += len(step.tokens)
    assert drafter is not None
    assert target.committed == drafter.observed == PROMPT + SCRIPT[: limit - 1]


def test_an_acceptor_or_target_cannot_push_tokens_past_the_limit() -> None:
    """Budget 0 (the last token) is a plain step: no draft call, one row."""
    _, target, drafter = generation(guess_right(LOGITS), limit=7)
    assert drafter is not None
    assert (target.num_verified, drafter.budgets) == ([5, 1], [4])


@pytest.mark.parametrize("offset", range(1, 12))
def test_stop_inside_a_block(offset: int) -> None:
    """Guards against text after the stop token; its rows may stay fed, as it was really emitted."""
    script = [1] * 20
    script[offset] = 7
    logits = scripted_logits(PROMPT, script)
    target, drafter = FakeTarget(logits), FakeDrafter(guess_right(logits))
    rounds = list(
        speculative_rounds(target, drafter, ReferenceAcceptor(GREEDY, PROMPT), StopRule({7}), PROMPT, max_new_tokens=20)
    )
    emitted = tokens_of(rounds)
    assert emitted == script[: offset + 1]
    assert rounds[-1].finish_reason == "stop"
    assert rounds[-1].num_accepted <= len(rounds[-1].tokens)
    # The state is that of a run that was only ever fed emitted tokens, and nothing emitted before is missing.
    sequence = (*PROMPT, *emitted)
    assert target.committed == drafter.observed
    assert target.committed in (sequence, sequence[:-1])


def test_stop_counts_only_what_was_emitted() -> None:
    """Guards against acceptance statistics that include drafts behind the stop token."""
    logits = scripted_logits(PROMPT, [1, 2, 7, 4, 5, 6])
    rounds = run_rounds(logits, PROMPT, SamplingParams(stop_token_ids=(7,)), guess_right(logits))
    assert [step.tokens for step in rounds] == [(1,), (2, 7)]
    assert (rounds[1].num_proposed, rounds[1].num_accepted) == (4, 2)
    stats = Stats()
    stats.add(rounds[1])
    assert stats.accepted_per_slot == [1, 1, 0, 0]


def test_stop_wins_over_the_limit_when_both_hit() -> None:
    rounds, _, _ = generation(guess_right(LOGITS), StopRule({SCRIPT[6]}), limit=7)
    assert tuple(tokens_of(rounds)) == SCRIPT[:7]
    assert rounds[-1].finish_reason == "stop"


@pytest.mark.parametrize("eos", [{1}, {1, 11}, {10, 1, 0}])
@pytest.mark.parametrize("kind", ["none", "always"])
def test_end_of_sequence_as_the_first_token(eos: set[int], kind: str) -> None:
    """Guards against a stop test that only looks inside rounds."""
    rounds, target, _ = generation(None if kind == "none" else guess_right(LOGITS), StopRule(eos))
    assert [step.tokens for step in rounds] == [(1,)]
    assert rounds[0].finish_reason == "stop"
    assert target.num_verified == []


def test_every_id_of_a_list_of_stop_ids_stops() -> None:
    """Guards against honouring only one end-of-sequence id."""
    for eos in (5, 9, 2):
        rounds, _, _ = generation(guess_right(LOGITS), StopRule({0, eos, 11}))
        assert tuple(tokens_of(rounds)) == SCRIPT[: SCRIPT.index(eos) + 1]


def test_mask_id_may_occur_anywhere() -> None:
    """Guards against output filtered by "id != mask": 9 is the drafter's mask id and its favourite
    proposal, it is in the prompt and in the answer."""
    prompt, script = (9, 3, 9), (9, 9, 1, 9, 2, 9, 9, 4)
    logits = scripted_logits(prompt, script)
    rounds = run_rounds(logits, prompt, SamplingParams(max_new_tokens=8), lambda prefix: 9)
    assert tuple(tokens_of(rounds)) == script


def test_mask_id_equal_to_end_of_sequence() -> None:
    """Guards against a stop found among rejected proposals: only accepted tokens may stop."""
    rounds = run_rounds(LOGITS, PROMPT, GREEDY, lambda prefix: 7, stopping=StopRule({7}))
    assert tuple(tokens_of(rounds)) == SCRIPT[: SCRIPT.index(7) + 1]


@pytest.mark.parametrize("kind", GUESSES)
@pytest.mark.parametrize("num_rounds", range(1, 6))
def test_consumer_that_closes_early_leaves_a_usable_state(kind: str, num_rounds: int) -> None:
    """Guards against state that runs ahead of what was shown: both sessions continue from there."""
    target, drafter = FakeTarget(LOGITS), FakeDrafter(GUESSES[kind](LOGITS))
    acceptor = ReferenceAcceptor(GREEDY, PROMPT)
    rounds = speculative_rounds(target, drafter, acceptor, StopRule(), PROMPT, max_new_tokens=25)
    emitted = tokens_of(list(itertools.islice(rounds, num_rounds)))
    rounds.close()
    sequence = (*PROMPT, *emitted)
    assert target.committed == drafter.observed == sequence[:-1]
    proposal = drafter.propose(emitted[-1], 2)
    acceptance = acceptor.accept(proposal, target.verify(emitted[-1], proposal))
    next_tokens = (*proposal.tokens[: acceptance.num_accepted], acceptance.next_token)
    assert next_tokens == SCRIPT[len(emitted) : len(emitted) + len(next_tokens)]


@pytest.mark.parametrize("max_length", range(4, 14))
def test_full_context_ends_the_generation(max_length: int) -> None:
    """Guards against rows fed beyond the context (the fake refuses them) and against an error in mid-answer."""
    rounds, _, _ = generation(guess_right(LOGITS), max_length=max_length)
    assert tuple(tokens_of(rounds)) == SCRIPT[: max_length - len(PROMPT)]
    assert rounds[-1].finish_reason == "length"


def test_bad_requests_are_refused_before_anything_is_fed() -> None:
    """Guards against errors that only appear when the first round is asked for, or as a backend traceback."""

    def start(prompt: tuple[int, ...], max_new_tokens: int = 1, width: int | None = None) -> None:
        target = FakeTarget(LOGITS, max_length=3)
        acceptor = ReferenceAcceptor(GREEDY, prompt)
        speculative_rounds(target, None, acceptor, StopRule(), prompt, max_new_tokens=max_new_tokens, width=width)

    with pytest.raises(PromptError, match="empty"):
        start(())
    with pytest.raises(PromptError, match=r"3 tokens.*holds 3"):
        start((1, 2, 3))
    with pytest.raises(ConfigError, match="max_new_tokens"):
        start((1, 2), max_new_tokens=0)
    with pytest.raises(ConfigError, match="width"):
        start((1, 2), width=0)


def test_an_unfilled_proposal_is_fine() -> None:
    """A drafter may propose less than its budget, or nothing (a copy drafter without a match)."""

    class Shy(FakeDrafter):
        def propose(self, anchor: int, budget: int) -> Proposal:
            return Proposal(super().propose(anchor, budget).tokens[: len(self.budgets) % 3])

    target, drafter = FakeTarget(LOGITS), Shy(guess_right(LOGITS))
    acceptor = ReferenceAcceptor(GREEDY, PROMPT)
    rounds = list(speculative_rounds(target, drafter, acceptor, StopRule(), PROMPT, max_new_tokens=12))
    assert tuple(tokens_of(rounds)) == SCRIPT[:12]
    assert {step.num_proposed for step in rounds[1:]} == {0, 1, 2}


def test_a_target_without_taps_gives_no_features() -> None:
    target, drafter = FakeTarget(LOGITS, has_taps=False), FakeDrafter(guess_right(LOGITS))
    acceptor = FakeAcceptor([0, 2, 0, 4])
    rounds = list(speculative_rounds(target, drafter, acceptor, StopRule(), PROMPT, max_new_tokens=9))
    assert [len(step.tokens) for step in rounds] == [1, 3, 1, 4]
    assert drafter.observed == target.committed


def test_time_is_split_between_draft_verify_and_overhead() -> None:
    """Guards against drafter work (its context included) or the consumer's time booked as something else."""
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    class SlowTarget(FakeTarget):
        def prefill(self, prompt_ids: Sequence[int]) -> Verdict:
            spend(100)
            return super().prefill(prompt_ids)

        def verify(self, anchor: int, proposal: Proposal) -> Verdict:
            spend(10)
            return super().verify(anchor, proposal)

        def commit(self, path: Sequence[int]) -> None:
            spend(0.5)
            super().commit(path)

    class SlowDrafter(FakeDrafter):
        def propose(self, anchor: int, budget: int) -> Proposal:
            spend(2)
            return super().propose(anchor, budget)

        def observe(self, token_ids: Sequence[int], features: Any) -> None:
            spend(1)
            super().observe(token_ids, features)

    rounds = speculative_rounds(
        SlowTarget(LOGITS),
        SlowDrafter(guess_right(LOGITS)),
        ReferenceAcceptor(GREEDY, PROMPT),
        StopRule(),
        PROMPT,
        max_new_tokens=11,
        clock=lambda: now,
    )
    stats = Stats()
    for index, step in enumerate(rounds):
        spend(1000)  # the consumer's own time
        if index == 0:
            assert (step.draft_seconds, step.verify_seconds, step.total_seconds) == (0, 100, 101)
        else:
            stats.add(step)
    assert (stats.draft_seconds, stats.verify_seconds, stats.decode_seconds) == (6, 20, 27)
    assert stats.overhead_seconds == 1
