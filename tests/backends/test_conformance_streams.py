"""The suite that every backend passes, on: what a request says while it runs, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dflash import SamplingParams
from dflash.core.engine import Engine, StreamEvent
from dflash.errors import ConfigError
from dflash.types import Result
from tests.backends.pairs import GREEDY, PROMPTS, OpenEngine
from tests.backends.tiny_pair import END


@pytest.fixture(scope="module")
def engine(open_engine: OpenEngine, target_folder: Path, draft_folder: Path) -> Engine:
    return open_engine(target_folder, draft_folder)


def collect(events: Sequence[StreamEvent]) -> Result:
    return Result("".join(e.text for e in events), [t for e in events for t in e.token_ids], events[-1].stats)


def test_stream_is_generate_in_pieces(engine: Engine) -> None:
    """Text is whole (multi-byte characters split over rounds), counts add up, the prefill is no round."""
    whole = engine.generate(PROMPTS[2], GREEDY)
    parts = collect(list(engine.stream(PROMPTS[2], GREEDY)))
    assert (parts.text, parts.token_ids) == (whole.text, whole.token_ids)
    assert whole.text == engine.decode(whole.token_ids)
    stats = whole.stats
    assert stats.num_tokens == len(whole.token_ids) == GREEDY.max_new_tokens
    assert stats.num_prompt_tokens == len(engine.tokenize(PROMPTS[2]))
    assert sum(stats.acceptance_lengths) == GREEDY.max_new_tokens - 1
    assert stats.finish_reason == "length"
    assert stats.prefill_seconds > 0
    assert 0 < stats.draft_seconds + stats.verify_seconds < stats.decode_seconds


def test_stops(engine: Engine) -> None:
    """Own end ids, request ids and strings end the text with and without a draft; ignore_eos goes on."""
    free = engine.generate("q", GREEDY)
    token = free.token_ids[20]
    first = free.token_ids.index(token)
    with_eos = type(engine)(
        target=engine.target,
        drafter=engine.drafter,
        tokenizer=engine.tokenizer,
        eos_ids=frozenset({END, token}),
        info=engine.info,
    )
    for use_draft in (True, False):
        for one, params in (
            (engine, SamplingParams(max_new_tokens=GREEDY.max_new_tokens, stop_token_ids=[token], ignore_eos=True)),
            (with_eos, SamplingParams(max_new_tokens=GREEDY.max_new_tokens)),
        ):
            result = one.generate("q", params, use_draft=use_draft)
            assert result.stats.finish_reason == "stop"
            assert result.token_ids[-1] in (token, END)
            assert result.token_ids == free.token_ids[: min(first + 1, len(result.token_ids))]
        text = free.text[10:14]
        result = engine.generate(
            "q", SamplingParams(max_new_tokens=GREEDY.max_new_tokens, stop=[text], ignore_eos=True)
        )
        assert result.text == free.text[: free.text.index(text)]
        assert result.stats.finish_reason == "stop"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("abc", r"must be a list: \['abc'\]"),
        (5, "must be a list of token ids, not 5"),
        (None, "must be a list of token ids, not None"),
        ([1.5], "whole numbers, not 1.5"),
        (["a"], "whole numbers, not 'a'"),
        ([[1, 2]], "whole numbers"),
        ([True], "whole numbers, not True"),
        ([-1], "holds -1"),
        ([2**70], "vocabulary has ids 0 to"),
    ],
)
def test_what_is_no_list_of_ids_is_not_decoded(engine: Engine, wrong: object, said: str) -> None:
    """Fault: the tokenizer's own error, which names neither the argument nor what it should be."""
    with pytest.raises(ConfigError, match=said):
        engine.decode(wrong)  # type: ignore[arg-type]
    assert engine.decode(np.array([104, 105])) == engine.decode((104, 105)) != ""  # type: ignore[arg-type]
