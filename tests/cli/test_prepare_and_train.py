"""`dflash prepare` and `dflash train` hand everything on; what they do is tested beside `dflash/train`."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from dflash.cli.main import load_command
from dflash.cli.prepare import describe
from dflash.prepare import run as preparation
from dflash.prepare.run import PrepareProgress, PrepareSummary
from dflash.resolve import Progress
from dflash.train import trainer
from dflash.train.trainer import TrainSummary
from tests.cli.fakes import CommandLine

SUMMARY = PrepareSummary(
    out=Path("answers"),
    num_answers=3,
    num_skipped=1,
    num_empty=0,
    num_prompt_tokens=30,
    num_answer_tokens=60,
    num_shards=2,
    num_resumed_shards=1,
    seconds=2.0,
    tokens_per_second=30.0,
)
PROGRESS = PrepareProgress(num_done=5, num_total=10, num_resumed=0, num_new_tokens=100, seconds=4.0)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of each call of `prepare`, which reports once and does nothing."""
    calls: list[dict[str, Any]] = []

    def prepare(prompts: Path, out: Path, target: str, **options: Any) -> PrepareSummary:
        options.pop("progress")(PROGRESS)
        calls.append({"prompts": prompts, "out": out, "target": target, **options})
        return SUMMARY

    monkeypatch.setattr(preparation, "prepare", prepare)
    return calls


def test_prepare_defaults_are_those_of_the_library() -> None:
    """Guards against the command and the function disagreeing about a default: the page shows the command's."""
    library = inspect.signature(preparation.prepare).parameters
    shared = [param for param in load_command("prepare").params if param.name in library and not param.required]
    assert len(shared) >= 12
    assert {param.name: param.default for param in shared if param.name != "target"} == {
        param.name: library[param.name].default for param in shared if param.name != "target"
    }


def test_prepare_hands_every_option_on(cli: CommandLine, prepared: list[dict[str, Any]]) -> None:
    """Guards against an option that is accepted and ignored."""
    words = (
        "--out O --target T -n 7 --temperature 0.5 --seed 3 --system S --raw --batch-size 2 --shard-size 4 "
        "--limit 6 --max-prompt-tokens 8 --dtype float32 --device cpu"
    )
    outcome = cli.run("prepare", "P", *words.split())
    assert outcome.code == 0, outcome.err
    assert prepared == [
        {
            "prompts": Path("P"),
            "out": Path("O"),
            "target": "T",
            "max_new_tokens": 7,
            "temperature": 0.5,
            "seed": 3,
            "system": "S",
            "raw": True,
            "batch_size": 2,
            "shard_size": 4,
            "limit": 6,
            "max_prompt_tokens": 8,
            "dtype": "float32",
            "device": "cpu",
        }
    ]


def test_prepare_says_what_it_left_behind(cli: CommandLine, prepared: list[dict[str, Any]]) -> None:
    """Guards against silent omissions: prompts that were too long must be counted aloud."""
    outcome = cli.run("prepare", "P", "--out", "O")
    assert "3 answers (60 tokens) in 2 files of answers" in outcome.out
    assert "1 prompts left out" in outcome.out
    record = json.loads(cli.run("prepare", "P", "--out", "O", "--json").out)
    assert record["num_answers"] == 3
    assert record["out"] == "answers"


def test_prepare_tells_pace_and_time_left() -> None:
    """Guards against a progress without the two figures one looks for."""
    assert describe(PROGRESS) == "5 of 10 answers, 25 tok/s, 0:00:04 left"


@pytest.mark.parametrize("content", [None, "no JSON\n", '{"question": "x"}\n', ""])
def test_prepare_refuses_a_bad_prompts_file(cli: CommandLine, tmp_path: Path, content: str | None) -> None:
    """Guards against a traceback for a missing, malformed, misnamed or empty file (before any model is loaded)."""
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    outcome = cli.run("prepare", str(path), "--out", str(tmp_path / "out"))
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert "prompts.jsonl" in outcome.err


def test_train_hands_everything_on(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against overrides or --resume that never reach the trainer, and an end that does not say where it is."""
    calls: list[tuple[Path, list[str], bool]] = []

    def run_training(recipe: Path, overrides: list[str], *, resume: bool, progress: Progress) -> TrainSummary:
        progress("step 1/5", 0.2)
        calls.append((recipe, list(overrides), resume))
        return TrainSummary(5, Path("runs/draft"), 2.5 if resume else float("nan"))

    monkeypatch.setattr(trainer, "run_training", run_training)
    resumed = cli.run("train", "r.yaml", "steps=5", "data.limit=3", "--resume")
    assert resumed.code == 0
    assert "runs/draft: a draft after 5 steps, acceptance length 2.50." in resumed.out
    assert "nan" not in cli.run("train", "r.yaml").out
    assert calls == [(Path("r.yaml"), ["steps=5", "data.limit=3"], True), (Path("r.yaml"), [], False)]


@pytest.mark.parametrize("overrides", [["steps=0"], ["nonsense=1"], ["steps"]])
def test_train_refuses_a_bad_recipe(cli: CommandLine, tmp_path: Path, overrides: list[str]) -> None:
    """Guards against unknown keys and bad values getting past the command, or ending in a traceback."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("target: t\nout: o\ndata:\n  answers: [a]\n", encoding="utf-8")
    outcome = cli.run("train", str(recipe), *overrides)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert overrides[0].split("=")[0] in outcome.err


def test_train_without_its_recipe(cli: CommandLine, tmp_path: Path) -> None:
    """Guards against a traceback for a mistyped path."""
    outcome = cli.run("train", str(tmp_path / "none.yaml"))
    assert outcome.code == 2
    assert "none.yaml" in outcome.err
