"""Loops and copies are counted to the token, and ordinary text is left alone."""

from __future__ import annotations

import math
import random

import pytest

from dflash.core.textshare import (
    MAX_PERIOD,
    MIN_COPY,
    MIN_LOOP,
    TextShare,
    copied_tokens,
    looping_tokens,
    pooled,
    repeated_tokens,
    text_share,
)


def fresh(length: int, first: int = 1000) -> list[int]:
    """Tokens that never repeat."""
    return list(range(first, first + length))


@pytest.mark.parametrize("period", [1, 2, 7, 30, MAX_PERIOD])
def test_a_loop_is_counted_from_its_second_round_on(period: int) -> None:
    """Guards against a detector for one period only, and against counting what stands around the loop."""
    num_loop = max(3 * period, MIN_LOOP) + period // 2
    pattern = list(range(period))
    loop = [pattern[index % period] for index in range(num_loop)]
    marks = looping_tokens([*fresh(20), *loop, *fresh(20, 5000)])
    assert marks == [False] * (20 + period) + [True] * (num_loop - period) + [False] * 20


@pytest.mark.parametrize(
    "tokens",
    [
        [1] * (MIN_LOOP - 1),
        [*fresh(10), *fresh(10), *fresh(5, 3000)],
        [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2,
        list(range(MAX_PERIOD + 1)) * 3,
        [],
        [7],
    ],
    ids=["indentation", "said twice", "two rounds", "too long a period", "nothing", "one token"],
)
def test_what_is_no_loop(tokens: list[int]) -> None:
    """Guards against alarms on good text."""
    assert not any(looping_tokens(tokens))


def test_random_text_has_neither() -> None:
    """Guards against shares that rise with the length of the text or with frequent tokens."""
    generator = random.Random(0)
    share = text_share([generator.randrange(60) for _ in range(500)], [generator.randrange(60) for _ in range(2000)])
    assert (share.num_tokens, share.looping, share.copied, share.repeated) == (2000, 0.0, 0.0, 0.0)


def test_a_copy_of_the_prompt_is_counted_to_the_token() -> None:
    """Guards against n-gram hits counted once instead of by the tokens they cover, and against chance phrases."""
    prompt = fresh(50)
    output = [1, 2, *prompt[10:25], 3, *prompt[30 : 30 + MIN_COPY - 1], 4]
    assert copied_tokens(prompt, output) == [False] * 2 + [True] * 15 + [False] * (MIN_COPY + 1)
    assert sum(copied_tokens(prompt, output[2:17])) == 15
    assert not any(copied_tokens(prompt[: MIN_COPY - 1], prompt))


def test_repeats_of_the_own_output_are_no_copies_of_the_prompt() -> None:
    """Guards against one number for two things: a loop is repeated, but nothing of the prompt is in it."""
    passage = fresh(12)
    output = [*passage, 1, 2, *passage]
    share = text_share(fresh(30, 9000), output)
    assert (share.num_copied, share.num_repeated, share.num_looping) == (0, 12, 0)
    assert repeated_tokens([], output) == [False] * 14 + [True] * 12
    assert repeated_tokens(passage, passage) == [True] * 12
    assert sum(repeated_tokens([], [5] * 40)) >= 39


def test_a_run_across_the_border_of_the_prompt_is_not_the_outputs() -> None:
    """Guards against prompt tokens that are counted as output."""
    passage = fresh(10)
    assert repeated_tokens([*passage, *passage[:6]], passage[6:]) == [False] * 4


def test_adding_up() -> None:
    """Guards against means of means: long answers count by their tokens; no token is no share."""
    whole = pooled([text_share([], [5] * 100), text_share([], fresh(300))])
    assert whole.num_tokens == 400
    assert whole.looping == 99 / 400
    assert math.isnan(TextShare().looping)
