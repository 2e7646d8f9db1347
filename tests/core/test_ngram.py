"""The n-gram index against brute force, and copies as a drafter of their own."""

from __future__ import annotations

import numpy as np
import pytest

from dflash.core.loop import speculative_rounds
from dflash.core.ngram import COPY_CHANCE, MATCH_STEPS, MAX_MATCH, MAX_ORDER, NUM_KEPT, NgramDrafter, NgramIndex
from dflash.core.reference import ReferenceAcceptor
from dflash.core.stopping import StopRule
from dflash.types import Proposal, SamplingParams
from tests.fakes import FakeTarget, random_logits, run_rounds, tokens_of


def brute_force(text: list[int], tail: list[int]) -> tuple[int, int] | None:
    """(token, match length) of the longest match among the latest occurrences of the longest n-gram that occurs."""
    for order in range(min(MAX_ORDER, len(tail)), 0, -1):
        ends = [end for end in range(order, len(text)) if text[end - order : end] == tail[len(tail) - order :]]
        if not ends:
            continue
        matches = []
        for end in ends[-NUM_KEPT:]:
            length = order
            while length < min(MAX_MATCH, end, len(tail)) and text[end - 1 - length] == tail[-1 - length]:
                length += 1
            matches.append((length, end))
        length, end = max(matches)
        return text[end], length
    return None


def test_copies_equal_brute_force() -> None:
    """Fault: an n-gram that ends at the text's end predicts a token that is not there, a stale occurrence wins over a
    later one, or the match is measured across the wrong tokens. Texts over four letters repeat at every length."""
    rng = np.random.default_rng(0)
    seen_lengths = set()
    for trial in range(60):
        index = NgramIndex()
        text = [int(token) for token in rng.integers(2 + trial % 3, size=90)]
        text += text[5:45] if trial % 2 else []
        for step in range(0, len(text), 7):
            index.extend(text[step : step + 7])
            drafted = [int(token) for token in rng.integers(3, size=step % 4)]
            tail = [*text[: step + 7], *drafted]
            found = index.copies(tail[-MAX_MATCH:])
            expected = brute_force(text[: step + 7], tail[-MAX_MATCH:])
            if expected is None:
                assert found == []
                continue
            assert (found[0].token, found[0].length) == expected
            assert len({copy.token for copy in found}) == len(found) <= 2
            assert sum(copy.chance for copy in found) <= 1
            seen_lengths.add(found[0].length)
    assert {1, 2, 3, MAX_MATCH} <= seen_lengths


def test_chances_rise_with_the_match_and_with_agreement() -> None:
    """Fault: a table whose classes are shifted, so that weak copies are fed and strong ones are not."""
    for chances in COPY_CHANCE.values():
        assert len(chances) == len(MATCH_STEPS)
        assert list(chances) == sorted(chances)
    for differ, only, agree in zip(*(COPY_CHANCE[kind] for kind in ("differ", "only", "agree")), strict=True):
        assert differ < only < agree
    index = NgramIndex()
    index.extend([1, 2, 3, 9, 1, 2, 3, 9, 5, 7, 5, 8, 5])
    assert index.copies([1, 2, 3])[0].chance == COPY_CHANCE["agree"][2]
    two = index.copies([5])
    assert [copy.token for copy in two] == [8, 7]
    assert two[0].chance == COPY_CHANCE["differ"][0]
    assert index.copies([7])[0].chance == COPY_CHANCE["only"][0]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_copies_alone_are_lossless(temperature: float) -> None:
    """Fault: what is copied reaches the text without the target's word. The same text as plain decoding."""
    logits = random_logits(1, scale=4.0)
    params = SamplingParams(max_new_tokens=80, temperature=temperature, seed=3)
    plain = tokens_of(run_rounds(logits, (3, 1, 4), params))
    rounds = list(
        speculative_rounds(
            FakeTarget(logits),
            NgramDrafter(6),
            ReferenceAcceptor(params, (3, 1, 4)),
            StopRule(),
            (3, 1, 4),
            max_new_tokens=80,
        )
    )
    assert tokens_of(rounds) == plain
    assert max(step.num_proposed for step in rounds) == 6
    if temperature == 0:
        assert sum(step.num_accepted for step in rounds) > 20  # a greedy text of this target soon runs in a circle


def test_a_repetition_is_copied_beyond_its_first_round() -> None:
    """Fault: a copy ends where the text ends, though its own tokens go on matching (loops, tables)."""
    drafter = NgramDrafter(9)
    drafter.observe([1, 2, 3, 1, 2, 3], None)
    assert drafter.propose(1, 9) == Proposal((2, 3, 1, 2, 3, 1, 2, 3, 1))
    assert drafter.propose(7, 9) == Proposal()
