"""`dflash check` over a real (tiny) target and a draft that has learnt its answer: read rightly and in wrong ways."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash.backends.torch.loading import set_threads
from dflash.check.run import check
from dflash.prepare.prompts import read_prompts
from dflash.types import SamplingParams
from tests.backends.pairs import load_with_taps
from tests.backends.tiny_pair import draft_config, edit_config, random_draft, save_draft, save_target, train_draft
from tests.cli.fakes import CommandLine, Outcome, runs_once

PROMPT = "Why is the sky blue?"
LENGTH = 44
MACHINES: dict[str, dict[str, Any]] = {
    "torch": {"dtype": "float32", "device": "cpu", "num_threads": 1},
    "mlx": {"dtype": "float32"},
}
WORDS = {
    "torch": ("--dtype", "float32", "--device", "cpu", "--threads", "1", "-n", str(LENGTH)),
    "mlx": ("--dtype", "float32", "--backend", "mlx", "-n", str(LENGTH)),
}


class Pair:
    """A target, a draft that has learnt it, and the prompt they are probed with."""

    def __init__(self, folder: Path) -> None:
        set_threads(1)
        self.prompts = folder / "prompts.jsonl"
        self.prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n", encoding="utf-8")
        self.target, self.draft = save_target(folder / "target"), folder / "draft"
        network = random_draft(draft_config(target_layer_ids=(1,), block_size=5))
        engine = load_with_taps(self.target, network.config.target_layer_ids)
        ids = engine.tokenize(PROMPT)
        params = SamplingParams(max_new_tokens=LENGTH + 6, ignore_eos=True)
        answer = engine.generate(prompt_ids=ids, params=params).token_ids
        train_draft(network, engine.target, [(ids, answer)], steps=70)
        engine.close()
        save_draft(self.draft, network)

    def copy(self, folder: Path, **changes: Any) -> Path:
        """The draft with another config.json."""
        shutil.copytree(self.draft, folder)
        edit_config(folder, **changes)
        return folder

    def check(self, draft: Path, backend: str, *, length: int = LENGTH) -> Any:
        return check(
            str(self.target),
            str(draft),
            prompts=read_prompts(self.prompts),
            backend=backend,
            max_new_tokens=length,
            **MACHINES[backend],
        )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(params=["torch", "mlx"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "mlx":
        pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
    name: str = request.param
    return name


def subjects(report: Any) -> list[str]:
    return [finding.subject for finding in report.findings if finding.severity == "error"]


def test_a_good_draft_is_usable(pair: Pair, backend: str) -> None:
    """Guards against a check that refuses what is right, or describes something else than what runs."""
    report = pair.check(pair.draft, backend)
    assert subjects(report) == []
    assert report.usable
    rows = {row.name: row.value for row in report.rows}
    kinds = {"torch": ("LlamaForCausalLM", "3 DynamicLayer"), "mlx": ("mlx-lm's llama", "3 KVCache")}[backend]
    assert kinds[0] in rows["target"]
    assert kinds[1] in rows["target layers"]
    assert rows["taps"].startswith("1: outputs")
    assert rows["taps elsewhere"].startswith("2 ")
    assert rows["block"] == "5 slots, at most 4 draft tokens"
    assert rows["mask id"] == "259 '<|mask|>'"
    assert rows["in the block"] == "sees the whole block"
    assert rows["rope"] == "theta 10000"
    assert len(rows["draft sha256"]) == 64
    assert rows["draft revision"] == "not from a hub"
    assert report.figures.num_places == LENGTH - 1
    assert report.figures.first_slot > 0.6
    assert report.figures.looped == report.figures.replayed
    assert report.figures.temperature() is not None


def test_the_anchor_read_the_other_way(pair: Pair, backend: str, tmp_path: Path) -> None:
    """Guards against a misread anchor: the same weights, said to predict from slot 0 on."""
    report = pair.check(pair.copy(tmp_path / "draft", sample_from_anchor=True), backend)
    assert "anchor" in subjects(report)
    assert not report.usable


@pytest.mark.parametrize("tap", [0, 2])
def test_taps_one_layer_off(pair: Pair, backend: str, tmp_path: Path, tap: int) -> None:
    """Guards against ids of the right count and range that are the wrong layers: nothing else can see it. In either
    direction: each has a variant of its own, and with answers that are just long enough to be judged."""
    report = pair.check(pair.copy(tmp_path / "draft", target_layer_ids=[tap]), backend, length=26)
    assert report.acceptance_judged
    assert "taps" in subjects(report)


def test_a_draft_that_cannot_be_loaded(pair: Pair, backend: str, tmp_path: Path) -> None:
    """Guards against an exception where a report should say what is wrong, and against reporting one conflict twice."""
    report = pair.check(pair.copy(tmp_path / "one", num_hidden_layers=3), backend)
    assert [finding.subject for finding in report.findings] == ["layers"]
    report = pair.check(pair.copy(tmp_path / "two", target_layer_ids=None), backend)
    assert subjects(report) == ["loading"]
    assert "target_layer_ids" in report.findings[0].message
    assert (report.usable, report.rows, report.figures) == (False, (), None)


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys, fake=False)


def run(command_line: CommandLine, pair: Pair, draft: Path, *words: str, backend: str = "torch") -> Outcome:
    shared = ("--prompts", str(pair.prompts), *WORDS[backend])
    return command_line.run("check", str(pair.target), str(draft), *shared, *words)


def test_command(pair: Pair, backend: str, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a record without what a later report must name, and a table without the verdict."""
    runs_once(monkeypatch, "dflash.check.run.check")
    outcome = run(command_line, pair, pair.draft, "--json", backend=backend)
    assert outcome.code == 0, outcome.err
    record = json.loads(outcome.out)
    assert (record["usable"], record["acceptance_judged"]) == (True, True)
    assert record["description"]["taps"]["origin"]
    assert record["description"]["draft sha256"]["value"]
    assert set(record["probe"]["variants"]) == {
        "other anchor reading",
        "taps one layer earlier",
        "taps one layer later",
    }
    assert record["probe"]["acceptance_per_slot"][0] > 0.5
    assert record["probe"]["temperature"]["num_slots"] > 40
    shown = run(command_line, pair, pair.draft, backend=backend)
    assert shown.code == 0
    for word in ("verdict: usable", "accepted by slot", "other anchor reading", "draft temperature", "theta 10000"):
        assert word in shown.out


def test_too_few_places(pair: Pair, backend: str, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against "usable" beside "too few places to judge", and against a judgement by three places: what was
    judged (the description) decides the code, what was not is said."""
    runs_once(monkeypatch, "dflash.check.run.check")
    outcome = run(command_line, pair, pair.draft, "-n", "4", backend=backend)
    assert outcome.code == 0
    assert "only 3 places were probed" in outcome.out
    assert "verdict: read without contradiction; acceptance, anchor and taps not judged" in outcome.out
    assert "not better" not in outcome.out
    record = json.loads(run(command_line, pair, pair.draft, "-n", "4", "--json", backend=backend).out)
    assert (record["usable"], record["acceptance_judged"]) == (True, False)


def test_exit_codes(pair: Pair, command_line: CommandLine, tmp_path: Path) -> None:
    """Guards against a script that cannot tell an unusable pair from a mistyped name."""
    broken = pair.copy(tmp_path / "draft", rope_theta=None)
    outcome = run(command_line, pair, broken)
    assert outcome.code == 1
    assert "error: loading: " in outcome.out
    assert "verdict: not usable" in outcome.out
    assert run(command_line, pair, tmp_path / "missing").code == 2
