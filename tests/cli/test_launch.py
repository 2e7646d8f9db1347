"""`dflash launch` up to the start of the engine: what it shows, refuses and passes on (`tests/launch` runs engines)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash.cli import launch as verb
from dflash.registry import LAUNCHERS
from tests.backends.tiny_pair import edit_config, save_draft, save_target
from tests.cli.fakes import CommandLine
from tests.launch.test_plans import golden_commands

QWEN = "Qwen/Qwen3-8B"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tester's own environment must not change the commands."""
    for name in ("VLLM_ROCM_USE_AITER", "SGLANG_USE_AITER", "VLLM_CPU_KVCACHE_SPACE", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("engine", LAUNCHERS)
def test_dry_run_prints_one_command(cli: CommandLine, engine: str) -> None:
    """Guards against notes between the words of a command that is piped into a shell."""
    outcome = cli.run("launch", engine, QWEN, "--platform", "amd", "--dry-run")
    assert outcome.code == 0
    assert outcome.out.rstrip("\n") == golden_commands()[engine, "amd", QWEN]


def test_json_record(cli: CommandLine) -> None:
    """Guards against programs that have to parse a shell line."""
    record = json.loads(cli.run("launch", "vllm", QWEN, "--platform", "amd", "--dry-run", "--json").out)
    assert record["env"] == {"VLLM_ROCM_USE_AITER": "1"}
    assert record["argv"][:3] == ["vllm", "serve", QWEN]
    assert record["url"] == "http://127.0.0.1:8000"


@pytest.mark.parametrize("words", [(), ("z-lab/Qwen3-8B-DFlash-b16",)], ids=["no draft named", "draft named"])
def test_what_follows_the_two_dashes(cli: CommandLine, words: tuple[str, ...]) -> None:
    """Guards against taking the engine's first flag for the draft."""
    outcome = cli.run("launch", "vllm", QWEN, *words, "--dry-run", "--platform", "nvidia", "--", "-tp", "2", "--x=y")
    assert outcome.code == 0, outcome.err
    assert outcome.out.rstrip("\n").endswith("-tp 2 --x=y")
    assert "z-lab/Qwen3-8B-DFlash-b16" in outcome.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tensorrt", QWEN), "use one of vllm, sglang"),
        (("vllm", QWEN, "--platform", "tpu"), "use one of nvidia, amd, cpu"),
        (("vllm", QWEN, "--width", "17"), "2 to 16"),
        (("vllm", QWEN, "--width", "1"), "2 to 16"),
        (("vllm", QWEN, "--width", "4", "--no-draft"), "drop one"),
        (("sglang", QWEN, "--platform", "cpu"), "GPUs only"),
        (("vllm", "me/unknown"), "no draft is shipped"),
    ],
)
def test_mistakes_are_one_line(cli: CommandLine, words: tuple[str, ...], said: str) -> None:
    """Guards against tracebacks, and against engines that are started with what they refuse."""
    outcome = cli.run("launch", *words, "--dry-run")
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("dflash: error: ")
    assert len(outcome.err.splitlines()) == 1
    assert said in outcome.err


def test_json_without_dry_run(cli: CommandLine) -> None:
    """Guards against an option that is accepted and ignored."""
    assert "--dry-run" in cli.run("launch", "vllm", QWEN, "--json").err


def test_force_turns_refusals_into_warnings(cli: CommandLine) -> None:
    """Guards against a check that outlives the engine's limitation and cannot be passed."""
    outcome = cli.run("launch", "sglang", QWEN, "--platform", "cpu", "--dry-run", "--force")
    assert outcome.code == 0
    assert "warning: SGLang runs DFlash on GPUs only" in outcome.err


def test_a_pair_that_does_not_fit(cli: CommandLine, tmp_path: Path) -> None:
    """Guards against loading both models for minutes to learn that they are strangers."""
    target, draft = save_target(tmp_path / "target"), save_draft(tmp_path / "draft")
    words = ("launch", "vllm", str(target), str(draft), "--platform", "cpu", "--dry-run")
    assert cli.run(*words).code == 0
    edit_config(draft, num_target_layers=77)
    outcome = cli.run(*words)
    assert outcome.code == 2
    assert "another target" in outcome.err


def test_this_machine(tmp_path: Path) -> None:
    """Guards against CUDA flags on an AMD machine because nobody looked."""
    assert verb._this_machine(tmp_path) == "cpu"
    (tmp_path / "kfd").touch()
    assert verb._this_machine(tmp_path) == "amd"
    (tmp_path / "nvidiactl").touch()
    assert verb._this_machine(tmp_path) == "nvidia"


def test_variables_of_the_user_are_left_alone(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against switching on again what somebody switched off."""
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "0")
    assert cli.run("launch", "vllm", QWEN, "--platform", "amd", "--dry-run").out.startswith("vllm serve")
