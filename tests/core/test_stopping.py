"""Stop tokens and stop strings, also through the loop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dflash.core.stopping import StopRule
from dflash.core.text import IncrementalText
from dflash.types import SamplingParams
from tests.fakes import guess_right, guess_sometimes, run_rounds, scripted_logits, tokens_of

PIECES = ("", "a", "b", "ab", "END", "E", "N", "D", " ", "\n", "x", "<eos>")
EOS = 11


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in ids if token != EOS)


def test_first_stop_keeps_the_stopping_token() -> None:
    rule = StopRule({EOS, 3})
    assert rule.first_stop((1, 2)) is None
    assert rule.first_stop((1, EOS, 3)) == 2
    assert rule.first_stop((3,)) == 1


def test_request_rule_joins_all_sources() -> None:
    """Guards against honouring only one source of stop ids, and against ignore_eos dropping the request's own."""
    rule = StopRule.for_request(SamplingParams(stop_token_ids=(5,), stop=("ab",)), (EOS, 9), decode)
    assert rule.first_stop((EOS,)) == rule.first_stop((9,)) == rule.first_stop((5,)) == 1
    assert rule.first_stop((1, 2, 1)) == 2
    rule = StopRule.for_request(SamplingParams(stop_token_ids=(5,), ignore_eos=True), (EOS, 5, 9), decode)
    assert rule.first_stop((EOS, 9)) is None
    assert rule.first_stop((9, 5)) == 2


def test_stop_string_over_tokens_and_rounds() -> None:
    """Guards against matching per token or per round only."""
    rule = StopRule(text=IncrementalText(decode, ["END"]))
    assert rule.first_stop((1, 5)) is None
    assert rule.first_stop((6,)) is None
    assert rule.first_stop((7, 1, 1)) == 1


@pytest.mark.parametrize("max_proposal", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("stop", [["END"], ["bE"], ["ab\n", "END"], ["\nEND x"], ["nothing", "a"]])
def test_stop_strings_cut_speculative_like_plain(stop: list[str], max_proposal: int) -> None:
    """Guards against a stop that depends on where rounds begin; also a stop string in the very first token."""
    script = (2, 2, 8, 1, 10, 3, 9, 4, 8, 10, 1, 2, 5, 6, 7, 1)
    logits = scripted_logits((10, 8), script)
    params = SamplingParams(max_new_tokens=16, stop=stop)
    expected = next(i for i in range(17) if any(s in decode(script[:i]) for s in stop))
    for guess in (None, guess_right(logits), guess_sometimes(logits)):
        rule = StopRule.for_request(params, (), decode)
        rounds = run_rounds(logits, (10, 8), params, guess, stopping=rule, max_proposal=max_proposal)
        assert tuple(tokens_of(rounds)) == script[:expected]
        assert rounds[-1].finish_reason == "stop"


def test_stop_string_in_the_first_token() -> None:
    logits = scripted_logits((1,), (4, 1, 1))
    params = SamplingParams(stop=("ND",))
    rounds = run_rounds(logits, (1,), params, stopping=StopRule.for_request(params, (), decode))
    assert tokens_of(rounds) == [4]


def test_prompt_text_is_no_part_of_a_stop_string() -> None:
    """The stop string belongs to the answer: a prompt that ends with its beginning does not count."""
    logits = scripted_logits((5, 6), (7, 1, EOS))
    params = SamplingParams(stop=("END",))
    rounds = run_rounds(logits, (5, 6), params, stopping=StopRule.for_request(params, (EOS,), decode))
    assert tokens_of(rounds) == [7, 1, EOS]
