"""Guess at every place of a few real answers, as the draft is configured and as it might have been meant.

Knows sessions (`core/protocols.py`) and NumPy, no tensor library: features are opaque rows whose columns are the taps.
First the real loop answers each prompt; then the answer is fed again in one go, and at each of its tokens every variant
of the draft guesses from the features of what stands before. So all variants are judged at the same places, where the
draft really works, and the loop's own rounds can be compared with guesses from fresh states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dflash.check.measures import (
    Paired,
    TemperatureFit,
    agreeing_prefix,
    fit_temperature,
    overlap,
    paired,
)
from dflash.core.parking import LEAST_SHARE
from dflash.core.protocols import Drafter, Target
from dflash.core.reference import FloatArray
from dflash.types import Proposal, Round

CONFIGURED = "configured"
OTHER_READING = "other anchor reading"
EARLIER, LATER = "taps one layer earlier", "taps one layer later"


@dataclass(frozen=True)
class Variant:
    """One way to run the draft."""

    session: Callable[[], Drafter]
    columns: Sequence[int] | None
    """Columns of the recorded features that make up this variant's taps, in order; None = all."""


@dataclass(frozen=True)
class Answer:
    """What the real loop said."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    rounds: Sequence[Round]
    """All of them, the prefill's first."""


class Subject(Protocol):
    """A pair as the probe sees it."""

    @property
    def variants(self) -> Mapping[str, Variant]:
        """All ways to run the draft, CONFIGURED among them."""
        ...

    def answer(self, prompt_ids: Sequence[int]) -> Answer:
        """Answer greedily through the real loop, with the draft."""
        ...

    def recorder(self) -> Target:
        """A fresh session that records the taps of all variants."""
        ...

    def probabilities(self, logits: Any) -> FloatArray:
        """Softmax at temperature 1 of logits [rows, V]."""
        ...


@dataclass
class Figures:
    """What the probe counted; filled prompt by prompt."""

    num_prompts: int = 0
    lengths: dict[str, list[int]] = field(default_factory=dict)
    """Variant -> tokens that agreed, per place."""
    proposed_per_slot: list[int] = field(default_factory=list)
    accepted_per_slot: list[int] = field(default_factory=list)
    """Of the loop's rounds."""
    acceptance_lengths: list[int] = field(default_factory=list)
    """Tokens per round of the loop, the target's own included."""
    looped: list[int] = field(default_factory=list)
    """Accepted tokens of each of the loop's rounds ..."""
    replayed: list[int] = field(default_factory=list)
    """... and how many of them a guess from fresh states has right at the same place."""
    overlaps: list[FloatArray] = field(default_factory=list)
    argmax_probs: list[float] = field(default_factory=list)

    @property
    def num_places(self) -> int:
        """Places at which every variant guessed."""
        return len(self.lengths[CONFIGURED])

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per round of the loop (nan without a round)."""
        return float(np.mean(self.acceptance_lengths)) if self.acceptance_lengths else float("nan")

    @property
    def first_slot(self) -> float:
        """Share of places at which the first guess is right."""
        return float(np.mean([length > 0 for length in self.lengths[CONFIGURED]]))

    @property
    def agreement(self) -> float:
        """Tokens that agree per place, as configured."""
        return float(np.mean(self.lengths[CONFIGURED]))

    @property
    def acceptance_per_slot(self) -> list[float]:
        """Share of the loop's rounds with a proposal for the slot in which it was accepted."""
        return [a / p for a, p in zip(self.accepted_per_slot, self.proposed_per_slot, strict=True)]

    def comparisons(self) -> dict[str, Paired]:
        """Every other variant against the configured draft; {} without a place."""
        names = [name for name in self.lengths if name != CONFIGURED]
        return {name: self.compared(name) for name in names} if self.num_places else {}

    def compared(self, variant: str) -> Paired:
        """A variant against the configured draft."""
        return paired(self.lengths[CONFIGURED], self.lengths[variant])

    def temperature(self) -> TemperatureFit | None:
        """The draft temperature that fits the slots which verification would have reached."""
        return fit_temperature(self.overlaps, self.argmax_probs)

    @property
    def is_noise(self) -> bool:
        """Whether the draft guesses too badly to be of any use."""
        return self.first_slot < LEAST_SHARE


def probe(subject: Subject, prompts: Sequence[Sequence[int]]) -> Iterator[Figures]:
    """Probe with these prompts [token ids]; yields the figures so far after each prompt."""
    figures = Figures(lengths={name: [] for name in subject.variants})
    for prompt_ids in prompts:
        answer = subject.answer(prompt_ids)
        _count_rounds(figures, answer)
        if len(answer.token_ids) > 1:
            _count_guesses(figures, subject, answer)
        figures.num_prompts += 1
        yield figures


def _count_rounds(figures: Figures, answer: Answer) -> None:
    for step in answer.rounds[1:]:
        figures.acceptance_lengths.append(len(step.tokens))
        while len(figures.proposed_per_slot) < step.num_proposed:
            figures.proposed_per_slot.append(0)
            figures.accepted_per_slot.append(0)
        for slot in range(step.num_proposed):
            figures.proposed_per_slot[slot] += 1
            figures.accepted_per_slot[slot] += slot < step.num_accepted


def _count_guesses(figures: Figures, subject: Subject, answer: Answer) -> None:
    prompt, text = list(answer.prompt_ids), list(answer.token_ids)
    recorder = subject.recorder()
    before = recorder.prefill(prompt).features
    verdict = recorder.verify(text[0], Proposal(tuple(text[1:-1])))
    probs = subject.probabilities(verdict.logits)
    rounds = _rounds_by_place(answer)
    for name, variant in subject.variants.items():
        drafter = variant.session()
        drafter.observe(prompt, _columns(before, variant))
        features = _columns(verdict.features, variant)
        for place, anchor in enumerate(text[:-1]):
            guess = drafter.propose(anchor, drafter.max_proposal).tokens
            length = agreeing_prefix(guess, text[place + 1 :])
            figures.lengths[name].append(length)
            if name == CONFIGURED:
                if place in rounds:
                    figures.looped.append(rounds[place].num_accepted)
                    figures.replayed.append(min(length, rounds[place].num_proposed))
                _count_overlaps(figures, drafter, anchor, probs[place:], length)
            drafter.observe([anchor], features[place : place + 1])


def _count_overlaps(figures: Figures, drafter: Drafter, anchor: int, probs: FloatArray, length: int) -> None:
    """Slots that verification would have reached: those that agreed and the one after them; `probs` [rows, V] start
    with the first slot's row. Drafters without logits (`scores`) have no temperature."""
    scores: Callable[[int], tuple[FloatArray, NDArray[np.int64] | None]] | None = getattr(drafter, "scores", None)
    if scores is None:
        return
    logits, token_ids = scores(anchor)
    for slot in range(min(length + 1, len(logits), len(probs))):
        best = int(logits[slot].argmax())
        token = best if token_ids is None else int(token_ids[best])
        figures.overlaps.append(overlap(probs[slot], logits[slot], token_ids))
        figures.argmax_probs.append(float(probs[slot, token]))


def _rounds_by_place(answer: Answer) -> dict[int, Round]:
    """Index of the round's anchor in the answer -> the round, where something was proposed."""
    places: dict[int, Round] = {}
    place = -1
    for step in answer.rounds:
        if step.num_proposed:
            places[place] = step
        place += len(step.tokens)
    return places


def _columns(features: Any, variant: Variant) -> Any:
    return features if variant.columns is None else features[:, variant.columns]
