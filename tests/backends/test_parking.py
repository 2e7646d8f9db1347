"""The engine gives up on a draft that guesses like noise, and every result says so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dflash.backends.torch.engine import load
from dflash.cli.report import stats_record
from dflash.core.parking import WINDOW
from dflash.types import Drafting, SamplingParams
from tests.backends.tiny_pair import save_draft, save_target


def test_a_random_draft_is_parked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against an engine that goes on drafting noise, changes the text when it stops, keeps the reason for
    itself, or remembers it for the next request."""
    target, draft = save_target(tmp_path / "target"), save_draft(tmp_path / "draft")
    engine = load(target, draft, dtype="float32", device="cpu", num_threads=1)
    params = SamplingParams(max_new_tokens=90, ignore_eos=True)
    plain = engine.generate("What is it?", params, use_draft=False)
    assert plain.stats.drafting_stopped is None
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "dflash"):
            drafted = engine.generate("What is it?", params, drafting=Drafting(fixed=True))
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.proposed_per_slot[0] == WINDOW
        assert drafted.stats.drafting_stopped is not None
        assert [record.getMessage() for record in caplog.records] == [
            f"{drafted.stats.drafting_stopped}. `dflash check` looks for the reason."
        ]
        assert stats_record(drafted.stats)["drafting_stopped"] == drafted.stats.drafting_stopped
    engine.close()
