"""The exact commands of five published pairs on both makes of GPU, and the rules that every command follows.

golden.txt is reviewed by hand against the drafts' model cards and the engines' sources: a change of a flag has to show
there as a change, not as a surprise on somebody's cluster.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from dflash.launch.drafts import SLIDING, ServedDraft
from dflash.launch.locate import served_draft, served_target
from dflash.launch.plan import PLATFORMS, LaunchRequest, Plan, ServedTarget, merged, value_of
from dflash.registry import LAUNCHERS, load_attribute
from dflash.resolve import AUTO
from scripts.compare_engines import FLAGS, planned

GOLDEN = Path(__file__).parent / "golden.txt"
CUDA_WORDS = ("flash_attn", "fa3", "fa4", "trtllm", "flashinfer", "cuda")
PUBLISHED = (
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3.5-27B",
    "openai/gpt-oss-120b",
    "google/gemma-4-31B-it",
    "moonshotai/Kimi-K2.5",
)
LLAMA = ServedTarget(
    location="/models/tiny",
    name="tiny",
    architecture="LlamaForCausalLM",
    num_layers=30,
    vocab_size=49152,
    hidden_size=576,
)
DRAFT = ServedDraft(location="/drafts/tiny", block_size=8, target_layer_ids=(1, 15, 27), num_target_layers=30)


def request_for(target: str, platform: str, **changes: object) -> LaunchRequest:
    """What the command line makes of a published target."""
    found = served_target(target)
    plain = LaunchRequest(target=found, draft=served_draft(AUTO, found), platform=platform)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def tiny(**changes: object) -> LaunchRequest:
    """A target and a draft on this machine."""
    plain = LaunchRequest(target=LLAMA, draft=DRAFT, platform="nvidia")
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def plan_of(engine: str, request: LaunchRequest) -> Plan:
    made: Plan = load_attribute(LAUNCHERS[engine])(request)
    return made


def golden_commands() -> dict[tuple[str, str, str], str]:
    """(engine, platform, target) -> the command that was reviewed."""
    blocks = GOLDEN.read_text(encoding="utf-8").strip().split("\n\n")
    return {
        (engine, platform, target): command
        for head, command in (block.split("\n") for block in blocks)
        for _, engine, platform, target in [head.split(" ")]
    }


def speculation_of(plan: Plan) -> dict[str, object]:
    """vLLM's speculative configuration as its parser will see it."""
    read: dict[str, object] = json.loads(value_of(plan.argv, "--speculative-config") or "")
    return read


@pytest.mark.parametrize("target", PUBLISHED)
@pytest.mark.parametrize("platform", ["nvidia", "amd"])
@pytest.mark.parametrize("engine", sorted(LAUNCHERS))
def test_published_pairs(engine: str, platform: str, target: str) -> None:
    """Guards against a flag that changes, appears or goes without anybody looking at it."""
    plan = plan_of(engine, request_for(target, platform))
    assert plan.shell() == golden_commands()[engine, platform, target]
    assert plan.problems == ()


def test_golden_file_holds_what_is_tested() -> None:
    """Guards against a golden file with commands that nothing compares any more."""
    assert len(golden_commands()) == len(LAUNCHERS) * 2 * len(PUBLISHED)


@pytest.mark.parametrize("key", golden_commands(), ids="-".join)
def test_rules_of_every_command(key: tuple[str, str, str]) -> None:
    """Guards against CUDA's words on ROCm, AITER's on CUDA, a flag given twice, and unasked remote code."""
    engine, platform, _ = key
    command = golden_commands()[key]
    words = shlex.split(command)
    names = [word for word in words if word.startswith("--")]
    assert len(names) == len(set(names))
    assert "--trust-remote-code" not in names
    assert value_of(tuple(words), "--host") == "127.0.0.1"
    if platform == "amd":
        assert not [word for word in CUDA_WORDS if word in command.lower()]
        assert words[0] == {"vllm": "VLLM_ROCM_USE_AITER=1", "sglang": "SGLANG_USE_AITER=1"}[engine]
    else:
        assert "AITER" not in command


@pytest.mark.parametrize("engine", sorted(LAUNCHERS))
def test_a_shell_reads_back_the_plan(engine: str) -> None:
    """Guards against quoting that is lost when the shown command is pasted into a shell."""
    plan = plan_of(engine, tiny(target=dataclasses.replace(LLAMA, location="/my models/it's"), platform="amd"))
    words = shlex.split(plan.shell())
    assert words == [*(f"{name}={value}" for name, value in plan.env.items()), *plan.argv]


def test_number_of_tokens_vllm() -> None:
    """Guards against block for block - 1: one more makes vLLM read a slot that the draft was not trained for."""
    assert speculation_of(plan_of("vllm", tiny()))["num_speculative_tokens"] == 7
    assert speculation_of(plan_of("vllm", tiny(width=3)))["num_speculative_tokens"] == 2
    anchored = dataclasses.replace(DRAFT, kind="dspark", block_size=7, anchor_predicts=True)
    config = speculation_of(plan_of("vllm", tiny(draft=anchored)))
    assert (config["method"], config["num_speculative_tokens"]) == ("dspark", 7)


def test_number_of_tokens_sglang() -> None:
    """Guards against SGLang's other convention: rows with the anchor, for drafts that predict on it one more."""
    assert value_of(plan_of("sglang", tiny()).argv, "--speculative-num-draft-tokens") == "8"
    assert value_of(plan_of("sglang", tiny(width=3)).argv, "--speculative-num-draft-tokens") == "3"
    anchored = dataclasses.replace(DRAFT, kind="dspark", block_size=7, anchor_predicts=True)
    argv = plan_of("sglang", tiny(draft=anchored)).argv
    assert value_of(argv, "--speculative-algorithm") == "DSPARK"
    assert value_of(argv, "--speculative-num-draft-tokens") == "8"
    shorter = plan_of("sglang", tiny(draft=anchored, width=5)).argv
    assert value_of(shorter, "--speculative-num-draft-tokens") == "5"
    assert value_of(shorter, "--speculative-dspark-block-size") == "4"


@pytest.mark.parametrize("engine", sorted(LAUNCHERS))
def test_flags_of_the_user_pass_through_and_win(engine: str) -> None:
    """Guards against a flag that appears twice with two values, and against parallelism that is swallowed."""
    flags = ("--tensor-parallel-size", "4", "--data-parallel-size=2", "--port=9000", "--host", "0.0.0.0")
    plan = plan_of(engine, tiny(flags=flags))
    assert plan.argv[-len(flags) :] == flags
    assert [word.partition("=")[0] for word in plan.argv].count("--port") == 1
    assert plan.url == "http://127.0.0.1:9000"


def test_attention_backend_of_the_user_replaces_the_documented_one() -> None:
    """Guards against two --attention-backend flags of which the engine takes one silently."""
    plan = plan_of("vllm", request_for("Qwen/Qwen3-8B", "nvidia", flags=("--attention-backend", "flashinfer")))
    assert plan.argv.count("--attention-backend") == 1
    assert value_of(plan.argv, "--attention-backend") == "flashinfer"
    drafted = plan_of("vllm", request_for("Qwen/Qwen3-8B", "nvidia", draft_backend="flashinfer"))
    assert speculation_of(drafted)["attention_backend"] == "flashinfer"


def test_revisions_of_both_models() -> None:
    """Guards against a pinned revision that the engine does not get: repositories change in place."""
    pinned = dataclasses.replace(LLAMA, location="owner/tiny", name="owner/tiny", revision="abc")
    draft = DRAFT.at("owner/draft", "def")
    vllm = plan_of("vllm", tiny(target=pinned, draft=draft))
    assert value_of(vllm.argv, "--revision") == "abc"
    assert speculation_of(vllm)["revision"] == "def"
    sglang = plan_of("sglang", tiny(target=pinned, draft=draft))
    assert value_of(sglang.argv, "--revision") == "abc"
    assert value_of(sglang.argv, "--speculative-draft-model-revision") == "def"


@pytest.mark.parametrize("engine", sorted(LAUNCHERS))
def test_a_folder_is_served_under_its_name(engine: str) -> None:
    """Guards against clients that have to know a path of the server's machine."""
    assert value_of(plan_of(engine, tiny()).argv, "--served-model-name") == "tiny"
    assert value_of(plan_of(engine, request_for("Qwen/Qwen3-8B", "nvidia")).argv, "--served-model-name") is None


@pytest.mark.parametrize("engine", sorted(LAUNCHERS))
@pytest.mark.parametrize("platform", PLATFORMS)
def test_without_a_draft(engine: str, platform: str) -> None:
    """Guards against a baseline that speculates, or that a check for drafts refuses."""
    plan = plan_of(engine, tiny(draft=None, platform=platform, flags=("--pipeline-parallel-size", "2")))
    assert "speculative" not in plan.shell()
    assert plan.problems == ()


@pytest.mark.parametrize(("engine", "platform"), [("vllm", "amd"), ("vllm", "cpu"), ("sglang", "amd")])
def test_variables_that_the_user_set_are_left_alone(engine: str, platform: str) -> None:
    """Guards against overriding somebody's own environment."""
    plan = plan_of(engine, tiny(platform=platform))
    (name,) = plan.env
    assert plan_of(engine, tiny(platform=platform, environment={name: "0"})).env == {}


def test_mixed_windows_name_the_runner() -> None:
    """Guards against versions of vLLM that refuse such drafts unless told to take the second model runner."""
    mixed = dataclasses.replace(DRAFT, layer_types=(SLIDING, "full_attention"))
    assert plan_of("vllm", tiny(draft=mixed)).env == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert plan_of("vllm", tiny()).env == {}


def test_another_interpreter() -> None:
    """Guards against starting the engine of another environment than the one that was named."""
    vllm = plan_of("vllm", tiny(python="/envs/vllm/bin/python")).argv
    assert vllm[:5] == ("/envs/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/tiny")
    assert plan_of("sglang", tiny(python="/envs/s/bin/python")).argv[0] == "/envs/s/bin/python"


def test_merging_knows_other_spellings() -> None:
    """Guards against our default beside the user's short spelling of the same flag."""
    assert merged({"--tp-size": "1", "--x": None}, ("--tp", "2"), {"--tp": "--tp-size"}) == ("--x", "--tp", "2")
    assert value_of(("--a", "1", "--a=2"), "--a") == "2"
    assert value_of(("--a",), "--a") is None


def test_the_comparison_of_engines_serves_what_launch_does() -> None:
    """Guards against a script that starts another command than `dflash launch` shows, or a pair that vLLM misreads."""
    target = "Qwen/Qwen3-8B"
    drafted = planned(target, AUTO, Path("/env/bin/python"), 8123)
    found = served_target(target)
    request = LaunchRequest(target=found, draft=served_draft(AUTO, found), platform="cpu", port=8123, flags=FLAGS)
    launched = plan_of("vllm", dataclasses.replace(request, python="/env/bin/python"))
    assert (drafted.argv, drafted.url) == (launched.argv, launched.url)
    assert "--speculative-config" in drafted.argv
    assert "--speculative-config" not in planned(target, None, Path("/env/bin/python"), 8123).argv
