"""Speculative text == plain text, option by option, with the reference acceptor in the real loop."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dflash.core.reference import distribution
from dflash.types import SamplingParams
from tests.fakes import guess_right, guess_sometimes, guess_wrong, random_logits, run_rounds, tokens_of
from tests.options import OPTIONS, with_option

PROMPT = (3, 1, 4, 1, 5)
LOGITS = random_logits(2)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_gives_plain_text(option: str, temperature: float) -> None:
    """Guards against a verify path that skips or misplaces logit processing."""
    params = with_option(option, temperature=temperature, max_new_tokens=40, seed=5)
    plain = tokens_of(run_rounds(LOGITS, PROMPT, params))
    for guess in (guess_right(LOGITS), guess_sometimes(LOGITS), guess_wrong(LOGITS)):
        for width in (2, 5):
            assert tokens_of(run_rounds(LOGITS, PROMPT, params, guess, width=width)) == plain
    without = tokens_of(run_rounds(LOGITS, PROMPT, SamplingParams(temperature=temperature, max_new_tokens=40, seed=5)))
    is_filter = option in ("top_k", "top_p", "min_p", "plain")
    assert plain != without or option == "plain" or (temperature == 0 and is_filter), "the option has no effect"


def test_presence_penalty_changes_inside_the_block() -> None:
    """Guards against penalties frozen at the start of a round: 1 is best until it has been said, then 2, then 3,
    so a block that repeats 1 must be cut after its first token and [1, 2, 3, 4] be accepted as a whole."""
    row = np.array([0, 5, 4.5, 4, 3.5, 0], np.float32)
    params = SamplingParams(max_new_tokens=6, presence_penalty=10)
    plain = run_rounds(lambda prefix: row, (0,), params)
    assert tokens_of(plain)[:4] == [1, 2, 3, 4]
    script = tokens_of(plain)
    knowing = run_rounds(lambda prefix: row, (0,), params, lambda prefix: script[len(prefix) - 1])
    assert [len(step.tokens) for step in knowing] == [1, 5]
    repeating = run_rounds(lambda prefix: row, (0,), params, lambda prefix: 1)
    assert tokens_of(repeating) == tokens_of(knowing) == script
    assert all(step.num_accepted == 0 for step in repeating)


def test_same_seed_same_text_at_any_width_and_other_seeds_differ() -> None:
    """Guards against draws keyed by round or by call instead of by position."""
    texts = set()
    for seed in range(8):
        params = SamplingParams(temperature=1.3, max_new_tokens=30, seed=seed)
        plain = tokens_of(run_rounds(LOGITS, PROMPT, params))
        for width in range(1, 9):
            speculative = run_rounds(LOGITS, PROMPT, params, guess_right(LOGITS), width=width, max_proposal=7)
            assert tokens_of(speculative) == plain
        texts.add(tuple(plain))
    assert len(texts) == 8


def test_loop_texts_have_the_law_of_the_target() -> None:
    """Three sampled tokens in the real loop, 3 000 seeds, neighbours against their exact law (25 cells each): guards
    against keyed draws that are correlated between positions or seeds, and against rows behind an accepted guess that
    are judged differently (the third token is mostly such a row's). Fixed seeds; wrong laws give p ~ 0."""
    logits = random_logits(4, vocab_size=5, scale=1.0)
    params = SamplingParams(temperature=0.9, max_new_tokens=3, top_p=0.95)
    counts = np.zeros((2, 5, 5))
    num_samples = 3_000
    for seed in range(num_samples):
        request = SamplingParams(temperature=0.9, max_new_tokens=3, top_p=0.95, seed=seed)
        text = tokens_of(run_rounds(logits, (2, 3), request, guess_right(logits), max_proposal=2))
        counts[0, text[0], text[1]] += 1
        counts[1, text[1], text[2]] += 1
    first = distribution(logits((2, 3)), params)
    then = np.stack([distribution(logits((2, 3, token)), params) for token in range(5)])
    last = np.stack([[distribution(logits((2, 3, a, b)), params) for b in range(5)] for a in range(5)])
    pairs = first[:, None] * then
    laws = (pairs, np.einsum("ab,abc->bc", pairs, last))
    for seen, law in zip(counts, laws, strict=True):
        expected = law.ravel().astype(np.float64)
        possible = expected > 0
        assert seen.ravel()[~possible].sum() == 0
        scaled = expected[possible] * num_samples / expected[possible].sum()
        assert stats.chisquare(seen.ravel()[possible], scaled).pvalue > 0.01
