"""What acceptors tell of the target's probabilities, and what the controller makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from dflash.core.adaptive import AdaptiveDrafter
from dflash.core.memory import TEMPERATURES, Memory
from dflash.core.reference import ReferenceAcceptor, distribution, process_logits
from dflash.types import Proposal, SamplingParams, Verdict

PROMPT = (1, 2)


def test_chances_are_those_of_the_processed_rows_along_the_path() -> None:
    """Fault: probabilities of raw logits, of rows that were not reached, or of another prefix."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=0.8, seed=3)
    logits = rng.normal(size=(3, 6)).astype(np.float32)
    asked = ((0, 1), (5,), ())
    for first in range(6):
        acceptance = ReferenceAcceptor(params, PROMPT).accept(Proposal((first, 4), asked=asked), Verdict(logits))
        prefixes = [(), (first,), (first, 4)]
        expected = tuple(
            tuple(
                float(distribution(process_logits(logits[row], params, PROMPT, prefixes[row]), params)[token])
                for token in asked[row]
            )
            for row in acceptance.path
        )
        assert acceptance.chances == expected
    greedy = ReferenceAcceptor(SamplingParams(), PROMPT).accept(Proposal((0, 4), asked=asked), Verdict(logits))
    assert greedy.chances == ()


def test_lessons_are_kept_apart_by_temperature() -> None:
    """Fault: what greedy answers teach (first choices are always right) is believed of sampled ones."""
    memory = Memory()
    classes = [memory.at(temperature) for temperature in (0.0, 0.3, 0.5, 0.7, 1.0, 2.0)]
    assert len(set(map(id, classes))) == len(TEMPERATURES) + 1
    assert classes[1] is classes[2]
    assert classes[4] is classes[5]


def test_estimates_follow_the_probability_and_not_the_luck_of_the_draw() -> None:
    """Fault: the outcome of one draw is counted where the target's probability is known. Copies that are drawn a third
    of the time: after so few rounds counts of hits would be far off."""
    memory = Memory()
    drafter = AdaptiveDrafter(None, memory, max_rows=4, temperature=1.0, clock=lambda: 0.0)
    text = [1, 2, 3] * 3
    drafter.observe(text, None)
    proposal = drafter.propose(1, 3)
    assert proposal.asked[0][0] == 2
    logits = np.log(np.full((len(proposal.tokens) + 1, 9), 1 / 9, np.float32))
    acceptance = ReferenceAcceptor(SamplingParams(temperature=1.0), text).accept(proposal, Verdict(logits))
    drafter.learn(acceptance)
    drafter.observe((1, *proposal.along(acceptance.path)), None)
    drafter.propose(acceptance.next_token, 3)
    counts = list(memory.at(1.0).survival._classes.values())
    assert sum(hits for hits, _ in counts) == pytest.approx(len(acceptance.path) / 9)
