"""Where two texts part: a tie that rounding may decide is told from a fault, and no tie excuses a broken promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from dflash.audit.forms import WHOLE_BLOCKS, Form
from dflash.audit.texts import audit_texts, first_difference
from dflash.cli.audit import shares
from dflash.core.engine import Engine
from dflash.core.reference import FloatArray
from dflash.types import Result, SamplingParams, Stats

PROMPT = [0, 1]
TOLERANCE = 0.01


class TwoTexts:
    """An engine that says one text without and another with its draft."""

    def __init__(self, plain: Sequence[int], drafted: Sequence[int], num_branches: int) -> None:
        self._texts = {False: list(plain), True: list(drafted)}
        self._num_branches = num_branches

    def generate(
        self, *, prompt_ids: Sequence[int], params: SamplingParams, use_draft: bool = True, drafting: Any = None
    ) -> Result:
        return Result("", self._texts[use_draft], Stats(num_proposed=self._num_branches))

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


class Knowing:
    """An oracle that wants 5, with 6 a little and everything else far behind."""

    def __init__(self, gap: float) -> None:
        self._gap = gap

    def logits(self, ids: Sequence[int], num_rows: int) -> FloatArray:
        row = np.zeros(8, np.float32)
        row[5], row[6] = 10, 10 - self._gap
        return np.tile(row, (num_rows, 1))

    def tolerance(self, ids: Sequence[int], num_rows: int) -> float:
        return TOLERANCE


def audited(
    plain: Sequence[int], drafted: Sequence[int], gap: float, *, must_agree: bool = False, num_branches: int = 0
) -> Any:
    engine = cast(Engine, TwoTexts(plain, drafted, num_branches))
    forms = [Form("whole blocks", engine, WHOLE_BLOCKS, chains_only=True)]
    return audit_texts(engine, Knowing(gap), "p", PROMPT, 4, forms, must_agree=must_agree)[0]


@pytest.mark.parametrize(
    ("gap", "must_agree", "verdict"), [(0.001, False, "near-tie"), (0.1, False, "fault"), (0.001, True, "fault")]
)
def test_verdicts(gap: float, must_agree: bool, verdict: str) -> None:
    """Guards against a fixed threshold (the tolerance is measured), and against float32 runs excused as ties."""
    found = audited([5, 5, 5], [5, 6, 5], gap, must_agree=must_agree)
    assert found.difference.position == 1
    assert (found.difference.plain, found.difference.drafted) == ("5", "6")
    assert found.difference.margin == pytest.approx(gap, abs=1e-6)
    assert found.difference.verdict == verdict
    assert found.passed == (verdict == "near-tie")


def test_equality_is_not_promised_where_branches_were_fed() -> None:
    """Guards against a tree's near-tie called a fault (its rows see their ancestors in other places of the cache), and
    against a tree that may say anything."""
    assert audited([5, 5], [5, 6], 0.001, must_agree=True, num_branches=1).difference.verdict == "near-tie"
    assert audited([5, 5], [5, 6], 0.1, must_agree=True, num_branches=1).difference.verdict == "fault"


def test_a_small_margin_does_not_excuse_a_third_token() -> None:
    """Guards against judging by the top-2 margin alone: the best two are tied, but the draft's text says another."""
    found = audited([5, 5], [5, 2], 0.0)
    assert found.difference.margin == 0
    assert found.difference.verdict == "fault"
    assert (found.stranger.position, found.stranger.token) == (1, "2")


@pytest.mark.parametrize(("plain", "drafted"), [([5, 5], [5]), ([5], [5, 5])])
def test_a_text_that_ends_early_is_a_fault(plain: list[int], drafted: list[int]) -> None:
    """Guards against texts compared up to the shorter one's end only."""
    found = audited(plain, drafted, 0.0)
    assert found.difference.position == 1
    assert found.difference.verdict == "fault"


def test_what_both_forms_say_wrongly_is_no_difference_but_a_fault() -> None:
    """Guards against an audit that only compares its own two forms."""
    found = audited([5, 3], [5, 3], 1.0)
    assert found.difference is None
    assert not found.passed
    assert found.stranger.distance == pytest.approx(10)


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([], [1]) == 0
    assert first_difference([1, 3], [1, 2]) == 1


def test_a_looping_text_is_said_to_loop() -> None:
    """Guards against a speed-up on a text of 40 equal tokens that nobody is warned about."""
    found = audited([5] * 40, [5] * 40, 1.0)
    assert found.passed
    assert found.share.looping > 0.9
    assert found.share.copied == 0
    assert shares(found.share)["looping_share"] == pytest.approx(39 / 40)
