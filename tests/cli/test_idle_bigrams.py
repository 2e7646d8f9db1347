"""Counts of neighbours beside drafts that say themselves what fits behind what: never read, never made, and said so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash.check.conflicts import idle_counts
from dflash.core.bigrams import BIGRAMS_FILE
from dflash.core.draft_reader import read_draft
from dflash.core.opening import open_pair
from dflash.registry import DRAFTERS
from tests.backends.eagle3_drafts import eagle3_config, random_eagle3, safeailab, save_eagle3
from tests.backends.test_dialect_engine import SPARK, layouts, network, saved
from tests.backends.tiny_pair import draft_config, random_draft, save_draft, save_target
from tests.cli.fakes import CommandLine

CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 16}
SELECTING = {"selector_rank": 12, "selector_top_k": 7}
COUNTS = json.dumps(
    {"tokens": {"ids": [1, 2], "counts": [3, 4]}, "pairs": {"first": [1], "second": [2], "counts": [3]}}
)


def dspark(folder: Path) -> Path:
    draft = network(**SPARK)
    return saved(folder, draft, layouts("dspark", draft)["deepspec"])


def eagle3(folder: Path) -> Path:
    config = eagle3_config()
    return save_eagle3(folder, random_eagle3(config), safeailab(config), midlayer=True)


OWN_TRANSITIONS: dict[str, Callable[[Path], Path]] = {
    "dflash2": lambda folder: save_draft(folder, random_draft(draft_config(**CONVOLVED, **SELECTING))),
    "dspark": dspark,
    "eagle3": eagle3,
}
NONE: dict[str, Callable[[Path], Path]] = {
    "dflash": save_draft,
    "dflash2": lambda folder: save_draft(folder, random_draft(draft_config(**CONVOLVED))),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "t")


def opened_counts(target: Path, draft: Path) -> int | None:
    """Pairs that an engine of this draft would judge candidates by."""
    pair = open_pair(
        target,
        draft,
        drafting=None,
        width=None,
        trust_remote_code=False,
        report=lambda what, share: None,
        backend="torch",
        kinds=DRAFTERS,
    )
    return None if pair.bigrams is None else len(pair.bigrams.pair_keys)


@pytest.mark.parametrize("kind", OWN_TRANSITIONS)
def test_counts_that_nothing_would_read(kind: str, target: Path, cli: CommandLine, tmp_path: Path) -> None:
    """Fault: the command counts for a draft whose candidates no count changes, and its engine asks for more of them."""
    draft, answers = OWN_TRANSITIONS[kind](tmp_path / "draft"), tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"id": "a/0", "prompt_ids": [1, 9], "answer_ids": [1, 2, 1, 2]}) + "\n")
    config = read_draft(draft).config
    assert (config.kind, config.has_transitions) == (kind, True)
    run = cli.run("bigrams", str(answers), "--draft", str(draft))
    assert run.code == 2
    (line,) = run.err.strip().splitlines()
    assert f"of kind {kind}" in line
    assert idle_counts(draft, config) == []
    assert not (draft / BIGRAMS_FILE).exists()
    for content in (COUNTS, "damaged"):
        (draft / BIGRAMS_FILE).write_text(content)
        assert opened_counts(target, draft) is None
        (finding,) = idle_counts(draft, config)
        assert (finding.severity, finding.subject) == ("note", "bigrams")


@pytest.mark.parametrize("kind", NONE)
def test_counts_that_are_read(kind: str, target: Path, cli: CommandLine, tmp_path: Path) -> None:
    """Fault: a draft without transitions, be it of a kind that may have some, is left without its counts."""
    draft, answers = NONE[kind](tmp_path / "draft"), tmp_path / "answers.jsonl"
    rows = [{"id": f"a/{n}", "prompt_ids": [n, 9], "answer_ids": [1, 2, 1, 2]} for n in range(9)]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (read_draft(draft).config.kind, opened_counts(target, draft)) == (kind, None)
    run = cli.run("bigrams", str(answers), "--draft", str(draft), "--json")
    assert run.code == 0, run.err
    assert opened_counts(target, draft) == json.loads(run.out)["pairs"] > 0
    assert idle_counts(draft, read_draft(draft).config) == []


def test_check_says_so(target: Path, cli: CommandLine, tmp_path: Path) -> None:
    """Fault: `check` shows counts that nothing reads, or is silent about a file without effect."""
    draft = OWN_TRANSITIONS["dflash2"](tmp_path / "draft")
    (draft / BIGRAMS_FILE).write_text(COUNTS)
    words = ("check", str(target), str(draft), "--dtype", "float32", "--device", "cpu", "--threads", "1")
    run = cli.run(*words, "-n", "4", "--limit", "1", "--json")
    record = json.loads(run.out)
    assert record["description"]["bigrams"]["value"].startswith("not needed")
    assert [one["message"] for one in record["findings"] if one["subject"] == "bigrams"] == [
        f"the draft says itself which tokens follow one another, so {BIGRAMS_FILE} is never read; remove it."
    ]
