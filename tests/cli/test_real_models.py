"""The commands over real (tiny, random) models on disk: what no fake can show is that the two sides fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash.backends.torch.loading import set_threads
from tests.backends.tiny_pair import CONTEXT, draft_config, edit_config, random_draft, save_draft, save_target
from tests.cli.fakes import CommandLine, Outcome

WORDS = ("--dtype", "float32", "--device", "cpu", "--threads", "1")
SAMPLED = ("--temperature", "0.8", "--top-p", "0.9", "--presence-penalty", "0.5", "--seed", "5")


class Pair:
    """A command line with a target and a draft."""

    def __init__(self, command_line: CommandLine, target: Path, draft: Path) -> None:
        self.cli, self.target, self.draft = command_line, target, draft

    def run(self, verb: str, *words: str, stdin: str = "") -> Outcome:
        return self.cli.run(verb, *WORDS, "--target", str(self.target), "--draft", str(self.draft), *words, stdin=stdin)

    def record(self, verb: str, *words: str) -> dict[str, Any]:
        outcome = self.run(verb, "--json", *words)
        assert outcome.code == 0, outcome.err
        record: dict[str, Any] = json.loads(outcome.out)
        return record


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Pair:
    """A random target and a random draft in a fresh folder."""
    set_threads(1)
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    target, draft = save_target(tmp_path / "target"), save_draft(tmp_path / "draft")
    return Pair(CommandLine(monkeypatch, capsys, fake=False), target, draft)


@pytest.mark.parametrize("sampling", [(), SAMPLED], ids=["greedy", "sampled"])
def test_same_tokens_with_and_without_a_draft(pair: Pair, sampling: tuple[str, ...]) -> None:
    """Guards against options that reach one of the two forms of decoding only."""
    words = ("-n", "40", "--ignore-eos", *sampling, "What is it?")
    drafted, plain = pair.record("generate", *words), pair.record("generate", "--no-draft", *words)
    fixed = pair.record("generate", "--fixed", *words)  # by cost, a slow machine might feed no guess
    assert drafted["token_ids"] == plain["token_ids"] == fixed["token_ids"]
    assert len(plain["token_ids"]) == 40
    assert drafted["engine"]["draft"] is not None
    assert plain["engine"]["draft"] is None
    assert fixed["stats"]["num_proposed"] > 0


def test_demo(pair: Pair) -> None:
    """Guards against a demo that only works with a fake engine."""
    record = pair.record("demo", "--limit", "1", "--repeats", "1", "-n", "24")
    assert record["same_tokens"] is True
    assert record["dflash_tokens_per_second"] > 0
    assert record["plain_padded_tokens_per_second"] > 0
    assert sum(count for _, count in record["acceptance_histogram"]) > 0


def test_chat(pair: Pair) -> None:
    """Guards against messages that the chat template of a real tokenizer refuses."""
    outcome = pair.run("chat", "-n", "8", stdin="Hi\nMore\n/stats\n")
    assert outcome.code == 0, outcome.err
    assert "answer 2: " in outcome.out


def test_prepare_and_again(pair: Pair, tmp_path: Path) -> None:
    """Guards against a prepare that cannot load what generate can, or starts over when it is finished."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers"
    prompts.write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n', encoding="utf-8")
    words = (str(prompts), "--out", str(out), "--target", str(pair.target), "--dtype", "float32", "-n", "8", "--json")
    first = json.loads(pair.cli.run("prepare", *words).out)
    again = json.loads(pair.cli.run("prepare", *words).out)
    assert first["num_answers"] == again["num_answers"] == 2
    assert first["num_resumed_shards"] == 0
    assert again["num_resumed_shards"] == again["num_shards"]


def corrupt(pair: Pair) -> None:
    (weights,) = pair.draft.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-50])


def another_hidden_size(pair: Pair) -> None:
    pair.draft = save_draft(pair.draft / "other", random_draft(draft_config(hidden_size=48)))


def another_vocabulary(pair: Pair) -> None:
    pair.draft = save_draft(pair.draft / "other", random_draft(draft_config(vocab_size=999)))


def no_taps(pair: Pair) -> None:
    edit_config(pair.draft, target_layer_ids=None)


def other_taps(pair: Pair) -> None:
    edit_config(pair.draft, target_layer_ids=[0, 1, 2])


def block_of_none(pair: Pair) -> None:
    edit_config(pair.draft, block_size=0)


def no_target(pair: Pair) -> None:
    pair.target = pair.target / "missing"


BREAKS = (corrupt, another_hidden_size, another_vocabulary, no_taps, other_taps, block_of_none, no_target)


@pytest.mark.parametrize("damage", BREAKS, ids=lambda damage: damage.__name__)
def test_bad_models_are_one_line_and_exit_code_2(pair: Pair, damage: Any) -> None:
    """Guards against tracebacks of the libraries below for models that a user may well hand over."""
    damage(pair)
    outcome = pair.run("generate", "hi")
    assert outcome.code == 2
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert all(line.startswith("dflash: ") for line in lines)
    assert [line.startswith("dflash: error: ") for line in lines if "warning: bit-exact" not in line] == [True]


def test_prompt_longer_than_the_context(pair: Pair) -> None:
    """Guards against an index error, or a silently cut prompt."""
    outcome = pair.run("generate", "x" * CONTEXT)
    assert outcome.code == 2
    assert str(CONTEXT) in outcome.err
    assert outcome.out == ""


@pytest.mark.parametrize("verb", ["generate", "demo", "chat"])
def test_a_width_beyond_the_block_is_refused(pair: Pair, verb: str) -> None:
    """Guards against measuring widths that are all the same one: the command line says what `dflash.load` says."""
    outcome = pair.run(verb, "--fixed", "--width", "9", *(["hi"] if verb == "generate" else []))
    assert outcome.code == 2
    assert outcome.err == (
        "dflash: error: width 9 is more than the 8 rows that a round feeds at most, so it would have no effect; lower "
        "it or leave it out.\n"
    )
    assert pair.run("generate", "-n", "4", "--width", "8", "hi").code == 0


def test_profile(pair: Pair) -> None:
    """Guards against a profile whose parts are not those of the engine: they add up to each round's time."""
    record = pair.record("generate", "-n", "12", "--ignore-eos", "--profile", "hi")
    assert len(record["rounds"]) == record["stats"]["num_rounds"] + 1
    assert all(min(step[part] for part in ("verify_seconds", "other_seconds")) > 0 for step in record["rounds"])
    assert record["rounds"][1]["draft_seconds"] > 0


def test_calibrate(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a calibration that measures nothing, is not kept, or whose prediction is no number."""
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    record = pair.record("calibrate", "--seconds", "0", "--limit", "1")
    assert record["verify"]["rows"] == [1, 2, 4, 8, 16]
    assert record["draft_seconds"] > 0
    (kept,) = (tmp_path / "costs").iterdir()
    assert json.loads(kept.read_text())["verify"] == record["verify"]
    assert [one["form"] for one in record["compared"]] == ["plain", "fixed", "auto"]
    for one in record["compared"]:
        assert one["predicted_tokens_per_second"] > 0
        assert one["measured_tokens_per_second"] > 0
    shown = pair.run("calibrate", "--seconds", "0", "--limit", "1")
    assert "rows" in shown.out
    assert "furthest off" in shown.out
    refused = pair.run("calibrate", "--fixed")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
