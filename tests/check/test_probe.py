"""The probe over fakes: every variant guesses at every place of the text, and the right one is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from dflash.check.judgement import LEAST_PLACES, judge
from dflash.check.probe import CONFIGURED, EARLIER, LATER, OTHER_READING, Answer, Figures, Variant, probe
from dflash.core.loop import speculative_rounds
from dflash.core.protocols import Drafter
from dflash.core.reference import FloatArray, ReferenceAcceptor
from dflash.core.stopping import StopRule
from dflash.types import Proposal, SamplingParams
from tests.fakes import FakeDrafter, FakeTarget, guess_right, guess_sometimes, guess_wrong, random_logits

LOGITS = random_logits(5)
PROMPTS = [(3, 1, 4), (2, 7)]
NUM_TOKENS = 30
RIGHT, WEAK, WRONG = guess_right(LOGITS), guess_sometimes(LOGITS), guess_wrong(LOGITS)


class Lagging(FakeDrafter):
    """Guesses what comes one place later: the other reading of the anchor."""

    def propose(self, anchor: int, budget: int) -> Proposal:
        return Proposal(super().propose(anchor, min(budget + 1, self.max_proposal)).tokens[1:])


class Seeing(FakeDrafter):
    """Guesses right as long as its features are positions (column 0) and not tokens (column 1)."""

    def __init__(self) -> None:
        super().__init__(self._guess_by_features)
        self._blind = False

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        start = len(self.observed)
        self._blind |= features[:, 0].tolist() != list(range(start, start + len(token_ids)))
        super().observe(token_ids, None)

    def _guess_by_features(self, prefix: tuple[int, ...]) -> int:
        return WRONG(prefix) if self._blind else RIGHT(prefix)


class Subject:
    """A pair of fakes."""

    def __init__(self, variants: Mapping[str, Variant], loop: Callable[[], Drafter] | None = None) -> None:
        self.variants = variants
        self._loop = loop or variants[CONFIGURED].session

    def answer(self, prompt_ids: Sequence[int]) -> Answer:
        params = SamplingParams(max_new_tokens=NUM_TOKENS)
        rounds = list(
            speculative_rounds(
                FakeTarget(LOGITS),
                self._loop(),
                ReferenceAcceptor(params, prompt_ids),
                StopRule(()),
                prompt_ids,
                max_new_tokens=NUM_TOKENS,
            )
        )
        return Answer(prompt_ids, [token for step in rounds for token in step.tokens], rounds)

    def recorder(self) -> FakeTarget:
        return FakeTarget(LOGITS)

    def probabilities(self, logits: Any) -> FloatArray:
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        normalised: FloatArray = probs / probs.sum(-1, keepdims=True)
        return normalised


def drafter(guess: Callable[[tuple[int, ...]], int], kind: type[FakeDrafter] = FakeDrafter) -> Variant:
    return Variant(lambda: kind(guess), None)


def run(subject: Subject) -> Figures:
    *_, figures = probe(subject, PROMPTS)
    return figures


def subjects_of(figures: Figures) -> list[str]:
    return [finding.subject for finding in judge(figures) if finding.severity == "error"]


def test_a_right_draft_is_usable_and_its_figures_are_the_loops() -> None:
    """Guards against places off by one: a draft that is always right must agree at every place, as far as it guesses,
    and the replayed rounds must be the loop's."""
    figures = run(Subject({CONFIGURED: drafter(RIGHT), OTHER_READING: drafter(RIGHT, Lagging)}))
    assert figures.num_prompts == 2
    assert figures.num_places == 2 * (NUM_TOKENS - 1)
    assert figures.first_slot == 1
    assert figures.agreement == pytest.approx((4 * (NUM_TOKENS - 4) + 3 + 2 + 1) / (NUM_TOKENS - 1))
    assert figures.acceptance_length == pytest.approx(29 / 6)
    assert figures.acceptance_per_slot == [1.0] * 4
    assert figures.looped == figures.replayed
    assert not judge(figures)


def test_a_weak_draft_is_usable() -> None:
    """Guards against a verdict by acceptance alone, which every young draft would fail."""
    figures = run(Subject({CONFIGURED: drafter(WEAK), OTHER_READING: drafter(WEAK, Lagging)}))
    assert 0.5 < figures.first_slot < 0.8
    assert figures.looped == figures.replayed
    assert not judge(figures)


def test_the_better_reading_of_the_anchor_is_found() -> None:
    """Guards against a misread anchor, which costs half the acceptance and shows nowhere."""
    figures = run(Subject({CONFIGURED: drafter(RIGHT, Lagging), OTHER_READING: drafter(RIGHT)}))
    assert "anchor" in subjects_of(figures)
    assert figures.compared(OTHER_READING).is_better


@pytest.mark.parametrize("name", [EARLIER, LATER])
def test_taps_one_layer_off_are_found(name: str) -> None:
    """Guards against shifted taps: the features' columns decide, in prompt and text."""
    seeing = [Variant(Seeing, [column]) for column in (0, 1)]
    right, wrong = (Subject({CONFIGURED: a, name: b}, Seeing) for a, b in (seeing, seeing[::-1]))
    assert subjects_of(run(right)) == []
    figures = run(wrong)
    assert "taps" in subjects_of(figures)
    assert figures.is_noise


def test_noise_is_not_usable() -> None:
    """Guards against a draft of another target that is called usable because no variant is better."""
    figures = run(Subject({CONFIGURED: drafter(WRONG), OTHER_READING: drafter(WRONG, Lagging)}))
    assert subjects_of(figures) == ["acceptance"]


def test_a_loop_that_loses_the_drafts_context_is_found() -> None:
    """Guards against a drafter that works on fresh states only: in the loop it forgets, so the text is right and the
    guesses are not."""
    figures = run(Subject({CONFIGURED: drafter(RIGHT)}, lambda: FakeDrafter(WRONG)))
    assert sum(figures.looped) == 0
    assert sum(figures.replayed) > 0
    assert subjects_of(figures) == ["draft state"]


class Scoring(FakeDrafter):
    """Knows the target's logits, scaled."""

    scale = 1.0

    def scores(self, anchor: int) -> tuple[FloatArray, None]:
        tokens = (*self.observed, anchor)
        rows = []
        for _ in range(self.max_proposal):
            rows.append(LOGITS(tokens) * np.float32(self.scale))
            tokens += (RIGHT(tokens),)
        return np.stack(rows), None


@pytest.mark.parametrize(("scale", "warned"), [(1.0, False), (0.25, True)])
def test_a_missing_logit_scale_is_found(scale: float, warned: bool) -> None:
    """Guards against rows of the target that belong to other slots, and against a scale fault that greedy guesses hide
    (arg max does not see it)."""
    kind = type("Scaled", (Scoring,), {"scale": scale})
    figures = run(Subject({CONFIGURED: drafter(RIGHT, kind)}))
    fit = figures.temperature()
    assert fit is not None
    assert fit.theta == pytest.approx(scale, rel=0.01)
    assert fit.sampled == pytest.approx(1, abs=1e-3)
    assert [finding.subject for finding in judge(figures)] == (["temperature"] if warned else [])


def test_too_few_places_are_no_verdict() -> None:
    """Guards against errors, or praise, from an answer of two tokens."""
    figures = Figures(lengths={CONFIGURED: [0] * (LEAST_PLACES - 1), OTHER_READING: [4] * (LEAST_PLACES - 1)})
    (finding,) = judge(figures)
    assert finding.severity == "warning"
    assert "--prompts" in finding.message
