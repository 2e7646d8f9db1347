"""`dflash convert` and `dflash models`: what they print, and that they hand everything on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dflash.core.bigrams import BIGRAMS_FILE, read_bigrams
from dflash.core.draft_reader import read_draft
from dflash.core.published import PUBLISHED
from dflash.registry import DRAFTS
from tests.backends.tiny_pair import save_draft
from tests.backends.tiny_targets import VOCAB_SIZE
from tests.cli.fakes import CommandLine


def test_convert(cli: CommandLine, tmp_path: Path) -> None:
    """Guards against options that do not reach the conversion, and a record that says something else."""
    draft, out = save_draft(tmp_path / "draft"), tmp_path / "out"
    run = cli.run("convert", str(draft), "--to", "transformers", "--out", str(out), "--json")
    assert run.code == 0
    record = json.loads(run.out)
    assert record == {
        "out": str(out),
        "from": "z-lab",
        "to": "transformers",
        "kind": "dflash",
        "dropped": [],
        "added": [],
    }
    assert read_draft(out).config == read_draft(draft).config
    run = cli.run("convert", str(out), "--to", "z-lab", "--out", str(tmp_path / "back"))
    assert "transformers -> z-lab" in run.out
    run = cli.run("convert", str(out), "--to", "eagle", "--out", str(tmp_path / "x"))
    assert run.code == 2
    assert "cannot be written" in run.err


def test_bigrams(cli: CommandLine, tmp_path: Path) -> None:
    """Guards against counts that do not reach the draft's folder or a converted draft, a record that says something
    else, and drafts that are not the user's own."""
    draft, answers = save_draft(tmp_path / "draft"), tmp_path / "answers.jsonl"
    rows = [{"id": f"a/{n}", "prompt_ids": [n, 9], "answer_ids": [1, 2, 1, 2, 3]} for n in range(40)]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = cli.run("bigrams", str(answers), "--draft", str(draft), "--limit", "30", "--json")
    assert run.code == 0
    file = draft / BIGRAMS_FILE
    assert json.loads(run.out) == {"file": str(file), "answers": 30, "tokens": 150, "pairs": 4}
    bigrams = read_bigrams(draft, VOCAB_SIZE)
    assert bigrams is not None
    after_one, after_two = bigrams.ratios(np.array([1, 2]), np.array([2]))[:, 0]
    assert after_one > 1 > after_two
    assert "4 pairs" in cli.run("bigrams", str(answers), "--draft", str(draft), "--limit", "20").out
    assert cli.run("convert", str(draft), "--to", "transformers", "--out", str(tmp_path / "out")).code == 0
    assert (tmp_path / "out" / BIGRAMS_FILE).read_bytes() == file.read_bytes()
    for words in ((str(answers), "--draft", "smollm2-135m"), (str(tmp_path / "none"), "--draft", str(draft))):
        run = cli.run("bigrams", *words)
        assert run.code == 2
        assert len(run.err.strip().splitlines()) == 1
    answers.write_text(json.dumps(rows[0] | {"answer_ids": [10**6, 1, 2]}) + "\n")
    assert cli.run("bigrams", str(answers), "--draft", str(draft)).code == 2


def test_models(cli: CommandLine) -> None:
    """Guards against a pair that is known and not shown, and a state that is not looked up."""
    run = cli.run("models", "--json")
    rows = [json.loads(line) for line in run.out.splitlines()]
    pairs = {(row["target"], row["draft"]) for row in rows}
    assert pairs >= {(entry.target, entry.draft) for entry in PUBLISHED}
    assert pairs >= {(target, name) for name, draft in DRAFTS.items() for target in draft.targets}
    assert {row["draft_state"] for row in rows} <= {"shipped", "here", "on the hub"}
    text = cli.run("models").out
    assert all(entry.draft in text for entry in PUBLISHED)


def test_models_sees_what_is_downloaded(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against "on the hub" for a draft that lies in the hub's cache."""
    import huggingface_hub

    def cached(repository: str, file: str) -> str | None:
        return str(tmp_path / file) if repository == "z-lab/Qwen3-8B-DFlash-b16" else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    rows = [json.loads(line) for line in cli.run("models", "--json").out.splitlines()]
    assert {row["draft"] for row in rows if row["draft_state"] == "here"} == {"z-lab/Qwen3-8B-DFlash-b16"}
