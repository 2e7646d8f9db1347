"""`dflash audit` over a real (tiny, random) pair: the record, the table and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash.audit.states import WidthAudit
from tests.backends.tiny_pair import save_draft, save_target
from tests.cli.fakes import CommandLine, Outcome, runs_once

SMALL = ("--dtype", "float32", "--device", "cpu", "--threads", "1", "-n", "6", "--runs", "2", "--limit", "1")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    return str(save_target(folder / "target")), str(save_draft(folder / "draft"))


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys, fake=False)


def audit(command_line: CommandLine, pair: tuple[str, str], *words: str) -> Outcome:
    return command_line.run("audit", *pair, *SMALL, *words)


def test_record_table_and_exit_code(
    command_line: CommandLine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a record without the shares that flatter a speed-up, a table that shows something else, or a
    script that takes a failed audit for a passed one."""
    runs_once(monkeypatch, "dflash.audit.run.audit")
    outcome = audit(command_line, pair, "--json")
    assert outcome.code == 0, outcome.err
    record = json.loads(outcome.out)
    assert record["passed"] is True
    assert record["failures"] == []
    assert record["engine"]["draft_sha256"]
    assert record["looping_share"] is not None
    assert record["copied_share"] == 0
    assert len(record["widths"]["classes"]) >= 1
    assert record["laws"][0]["num_runs"] == 2
    shown = audit(command_line, pair)
    assert shown.code == 0
    assert "verdict: no fault was found" in shown.out
    for word in ("width classes", "rejected rows", "same tokens", "decisions on one block", "looping"):
        assert word in shown.out
    monkeypatch.setattr(WidthAudit, "passed", False)
    faulty = audit(command_line, pair)
    assert faulty.code == 1
    assert "FAULT: " in faulty.out
    assert "verdict: 1 faults" in faulty.out


def test_bad_input_is_exit_code_2(command_line: CommandLine, pair: tuple[str, str]) -> None:
    """Guards against a missing model that looks like a failed audit."""
    assert audit(command_line, (pair[0] + "-missing", pair[1])).code == 2
    assert audit(command_line, pair, "--prompts", "missing.jsonl").code == 2


@pytest.mark.parametrize("kind", ["ngram", "language model"])
def test_drafters_without_a_block(kind: str, command_line: CommandLine, pair: tuple[str, str], tmp_path: Path) -> None:
    """Guards against an audit (or a check) that takes every draft for one of blocks: copies alone, and a smaller
    language model. A check has nothing to read there and says what does."""
    draft = "ngram" if kind == "ngram" else str(save_target(tmp_path / "small", seed=3))
    outcome = audit(command_line, (pair[0], draft), "--json", "-n", "12")
    assert outcome.code == 0, outcome.err
    record = json.loads(outcome.out)
    assert record["passed"]
    assert [text["form"] for text in record["texts"]] == ["whole blocks", "as loaded", "all guesses", "trees"]
    if kind == "language model":
        assert all(text["num_guesses"] > 0 for text in record["texts"] if text["form"] != "as loaded")
    refused = command_line.run("check", pair[0], draft, "--dtype", "float32", "--threads", "1")
    assert refused.code == (2 if kind == "ngram" else 1)
    assert "dflash audit" in refused.err if kind == "ngram" else "`audit`" in refused.out


def test_forms_that_never_drafted_are_named(command_line: CommandLine, pair: tuple[str, str]) -> None:
    """Guards against "no fault" where nothing was tried: an answer of one token has no round."""
    outcome = audit(command_line, pair, "-n", "1")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("no guess was fed") == 4
