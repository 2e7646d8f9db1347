"""`prepare` end to end on a tiny target: complete, resumable to the byte, and loud about everything else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from dflash.errors import ConfigError, DataError, ModelError
from dflash.prepare.answers import MANIFEST_NAME, AnswerRow, read_answers
from dflash.prepare.run import PrepareProgress, PrepareSummary, prepare
from tests.prepare.tiny_target import (
    CONTEXT,
    END_ID,
    loader,
    tiny_model,
    tiny_target,
    tiny_tokenizer,
    write_prompts,
    write_rows,
)

NUM_PROMPTS = 22
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "batch_size": 3, "shard_size": 8}
"""Three shards (8, 8, 6 prompts), three batches each at most."""


def _prepare(folder: Path, out: str, **options: Any) -> PrepareSummary:
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        write_prompts(prompts, NUM_PROMPTS)
    return prepare(prompts, folder / out, "tiny", **{"loader": loader(), **OPTIONS, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Mapping[float, Path]:
    """Temperature -> the folder of a run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    for temperature in (0.0, 1.0):
        _prepare(folder, str(temperature), temperature=temperature)
    return {temperature: folder / str(temperature) for temperature in (0.0, 1.0)}


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


class _StopAfter:
    """A progress callback that fails at its n-th report (one at the start, then four per shard: batches and shard)."""

    def __init__(self, num_reports: int) -> None:
        self.left = num_reports

    def __call__(self, state: PrepareProgress) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_every_prompt_has_its_answer_in_file_order(tmp_path: Path) -> None:
    """Guards against rows that are lost, doubled, reordered by the length sort, or paired with another's answer."""
    summary = _prepare(tmp_path, "out")
    rows = list(read_answers(tmp_path / "out"))
    assert [row.id for row in rows] == [f"p{i}" for i in range(NUM_PROMPTS)]
    assert {row.source for row in rows} == {"test"}
    tokenizer = tiny_tokenizer()
    for row, line in zip(rows, (tmp_path / "prompts.jsonl").read_text().splitlines(), strict=True):
        assert tokenizer.decode(row.prompt_ids.tolist()) == f"<|user|>{json.loads(line)['prompt']}<|end|><|assistant|>"
        ended = row.answer_ids[-1] == END_ID
        assert ended or len(row.answer_ids) == 8
        assert END_ID not in row.answer_ids[:-1]
    assert (summary.num_answers, summary.num_skipped, summary.num_shards) == (NUM_PROMPTS, 0, 3)
    assert summary.num_answer_tokens == sum(len(row.answer_ids) for row in rows)
    assert summary.num_prompt_tokens == sum(len(row.prompt_ids) for row in rows)
    assert (summary.num_resumed_shards, summary.tokens_per_second > 0) == (0, True)


def test_batches_do_not_change_answers(tmp_path: Path) -> None:
    """Guards against left padding that shifts positions or leaks into attention: fp32, batches of 1 and of 8."""
    _prepare(tmp_path, "one", batch_size=1)
    _prepare(tmp_path, "eight", batch_size=8)
    assert list(read_answers(tmp_path / "one")) == list(read_answers(tmp_path / "eight"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("num_reports", "num_resumed"), [(1, 0), (4, 0), (6, 1), (9, 2)])
def test_interrupted_run_goes_on_to_the_same_bytes(
    whole: Mapping[float, Path], tmp_path: Path, temperature: float, num_reports: int, num_resumed: int
) -> None:
    """Guards against loss, duplicates and a shifted random stream after an interruption inside any shard."""
    with pytest.raises(KeyboardInterrupt):
        _prepare(tmp_path, "cut", temperature=temperature, progress=_StopAfter(num_reports))
    assert not (tmp_path / "cut" / MANIFEST_NAME).exists()
    summary = _prepare(tmp_path, "cut", temperature=temperature)
    assert summary.num_resumed_shards == num_resumed
    assert _contents(tmp_path / "cut") == _contents(whole[temperature])


CHILD = """
import gc, os, signal, sys
gc.disable()  # a fifth of the imports below
from pathlib import Path
from dflash.prepare.run import prepare
from tests.prepare.tiny_target import loader

def kill(state):
    if state.num_done >= 11:
        os.kill(os.getpid(), signal.SIGKILL)

prepare(Path(sys.argv[1]), Path(sys.argv[2]), "tiny", loader=loader(), progress=kill,
        max_new_tokens=8, batch_size=3, shard_size=8)
"""


def test_killed_process_goes_on_to_the_same_bytes(whole: Mapping[float, Path], tmp_path: Path) -> None:
    """Guards against state that only an orderly exit writes or frees: a real kill -9 inside the second shard, with a
    half-written temporary file left as a kill inside a write leaves it, and a lock that the dead process held."""
    write_prompts(tmp_path / "prompts.jsonl", NUM_PROMPTS)
    root = Path(__file__).parents[2]
    search = f"import sys; sys.path[:0] = [{str(root / 'src')!r}, {str(root)!r}]\n"
    command = [sys.executable, "-c", search + CHILD, str(tmp_path / "prompts.jsonl"), str(tmp_path / "cut")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    names = {path.name for path in (tmp_path / "cut").iterdir()}
    assert names == {".lock", "run.json", "answers-00000.jsonl"}
    (tmp_path / "cut" / ".answers-00001.jsonl.4711.tmp").write_text('{"id": "p8", "prompt_')
    summary = _prepare(tmp_path, "cut")
    assert summary.num_resumed_shards == 1
    assert _contents(tmp_path / "cut") == _contents(whole[0.0])


def test_finished_run_returns_without_the_target(tmp_path: Path) -> None:
    """Guards against doing the work twice, or loading a large model to find nothing to do."""
    first = _prepare(tmp_path, "out")
    before = _contents(tmp_path / "out")

    def fail(*_: object) -> Any:
        raise AssertionError("the target must not be loaded")

    again = _prepare(tmp_path, "out", loader=fail)
    assert (again.num_answers, again.num_answer_tokens) == (first.num_answers, first.num_answer_tokens)
    assert (again.num_resumed_shards, again.tokens_per_second) == (3, 0.0)
    assert _contents(tmp_path / "out") == before


def test_manifest_is_last_and_progress_is_true(tmp_path: Path) -> None:
    """Guards against a manifest over missing shards, and a bar that jumps, stalls or ends below 100 %."""
    states: list[PrepareProgress] = []

    def watch(state: PrepareProgress) -> None:
        assert not (tmp_path / "out" / MANIFEST_NAME).exists()
        states.append(state)

    with pytest.raises(KeyboardInterrupt):
        _prepare(tmp_path, "out", progress=_StopAfter(6))
    summary = _prepare(tmp_path, "out", progress=watch)
    assert (states[0].num_done, states[0].num_resumed, states[0].seconds_left) == (8, 8, None)
    done = [state.num_done for state in states]
    assert done == sorted(done)
    assert {state.num_total for state in states} == {NUM_PROMPTS}
    last = states[-1]
    assert (last.num_done, last.seconds_left) == (NUM_PROMPTS, 0.0)
    assert 0 < last.num_new_tokens < summary.num_answer_tokens
    assert last.tokens_per_second == pytest.approx(last.num_new_tokens / last.seconds)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_new_tokens": 9}, "max_new_tokens was 8, now 9"),
        ({"temperature": 0.5}, "temperature was 0.0, now 0.5"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"batch_size": 4}, "batch_size was 3, now 4"),
        ({"limit": 20}, "limit was None, now 20"),
        ({"system": "be brief"}, "system was None, now 'be brief'"),
        ({"loader": loader(tiny_model(seed=1))}, "weights was"),
        ({"loader": loader(tiny_model().bfloat16())}, "dtype was 'float32', now 'bfloat16'"),
        ({"loader": loader(tokenizer=tiny_tokenizer("{{ messages }}"))}, "template was"),
    ],
)
def test_other_options_or_target_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    """Guards against one set that mixes answers of two configurations."""
    with pytest.raises(KeyboardInterrupt):
        _prepare(tmp_path, "out", progress=_StopAfter(6))
    before = _contents(tmp_path / "out")
    with pytest.raises(DataError, match="was begun otherwise") as caught:
        _prepare(tmp_path, "out", **change)
    assert says in str(caught.value)
    assert "choose another output folder" in str(caught.value)
    assert _contents(tmp_path / "out") == before


def test_other_prompts_are_refused_even_when_finished(tmp_path: Path) -> None:
    """Guards against a prompts file that was edited while the answers were being made."""
    _prepare(tmp_path, "out")
    write_prompts(tmp_path / "prompts.jsonl", NUM_PROMPTS + 1)
    with pytest.raises(DataError, match="prompts_sha256 was"):
        _prepare(tmp_path, "out")


def test_damaged_shard_is_refused_on_resume(tmp_path: Path) -> None:
    """Guards against a manifest that blesses rows which are doubled, foreign or cut."""
    with pytest.raises(KeyboardInterrupt):
        _prepare(tmp_path, "out", progress=_StopAfter(6))
    shard = tmp_path / "out" / "answers-00000.jsonl"
    lines = shard.read_text().splitlines(keepends=True)
    for damaged in ([*lines, lines[0]], [lines[1], lines[0]], [lines[0].replace('"p0"', '"q"')]):
        shard.write_text("".join(damaged))
        with pytest.raises(DataError, match=r"not the answers to its prompts. Delete this file and run again"):
            _prepare(tmp_path, "out")
    shard.write_text(lines[0][:20])
    with pytest.raises(DataError, match=r"answers-00000\.jsonl:1: not JSON"):
        _prepare(tmp_path, "out")
    shard.unlink()
    assert _prepare(tmp_path, "out").num_answers == NUM_PROMPTS


def test_turns_are_answered_one_after_the_other(tmp_path: Path) -> None:
    """Guards against later turns that do not see the target's own earlier answer."""
    rows = [
        {"id": "m", "turns": ["one", "two", "three"]},
        {"id": "s", "messages": [{"role": "system", "content": "rule"}, {"role": "user", "content": "hi"}]},
        {"id": "q", "prompt": "single"},
    ]
    write_rows(tmp_path / "prompts.jsonl", rows)
    _prepare(tmp_path, "out", system="default")
    made: dict[str, AnswerRow] = {row.id: row for row in read_answers(tmp_path / "out")}
    assert list(made) == ["m", "m#turn2", "m#turn3", "s", "q"]
    tokenizer = tiny_tokenizer()

    def prompt(name: str) -> str:
        return str(tokenizer.decode(made[name].prompt_ids.tolist()))

    def answer(name: str) -> str:
        return str(tokenizer.decode(made[name].answer_ids.tolist(), skip_special_tokens=True))

    expected = "<|system|>default<|end|><|user|>one<|end|><|assistant|>" + answer("m")
    expected += (
        "<|end|><|user|>two<|end|><|assistant|>" + answer("m#turn2") + "<|end|><|user|>three<|end|><|assistant|>"
    )
    ids = tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert made["m#turn3"].prompt_ids.tolist() == ids
    assert prompt("s").startswith("<|system|>rule<|end|><|user|>hi")
    assert prompt("q").startswith("<|system|>default<|end|><|user|>single")


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    """Guards against prompts that vanish unseen, and against prompts that would run past the context."""
    rows = [{"prompt": "x" * 300}, {"prompt": "short"}, {"turns": ["y" * 100, "z" * 150, "never reached"]}]
    write_rows(tmp_path / "prompts.jsonl", rows)
    states: list[PrepareProgress] = []
    summary = _prepare(tmp_path, "out", progress=states.append)
    assert [row.id for row in read_answers(tmp_path / "out")] == ["line-2", "line-3"]
    assert (summary.num_answers, summary.num_skipped) == (2, 3)
    assert states[-1].num_done == states[-1].num_total == 5
    assert _prepare(tmp_path, "shorter", max_prompt_tokens=50).num_answers == 1
    with pytest.raises(DataError, match="every prompt is longer than 2 tokens"):
        _prepare(tmp_path, "none", max_prompt_tokens=2)
    with pytest.raises(ConfigError, match=f"leaves no room for a prompt in the target's context of {CONTEXT}"):
        _prepare(tmp_path, "full", max_new_tokens=CONTEXT)


def test_empty_answers_stop_the_run(tmp_path: Path) -> None:
    """Guards against hours of end tokens: a target that ends at once, as under a template that closes the answer."""
    model = tiny_model()
    model.lm_head.weight.data[:] = 0  # all logits equal: the arg max is id 0, made the end token here
    model.generation_config.eos_token_id = 0
    with pytest.raises(DataError, match=r"all 8 answers.*answer mask would be empty"):
        _prepare(tmp_path, "out", loader=loader(model))
    assert not list((tmp_path / "out").glob("*.jsonl"))


def test_raw_mode_continues_plain_text(tmp_path: Path) -> None:
    """Guards against base models being locked out, and against conversations taken as plain text."""
    base = loader(tokenizer=tiny_tokenizer(None))
    with pytest.raises(ModelError, match=r"no chat template.*--raw"):
        _prepare(tmp_path, "chat", loader=base)
    _prepare(tmp_path, "raw", loader=base, raw=True)
    first = next(read_answers(tmp_path / "raw"))
    assert tiny_tokenizer().decode(first.prompt_ids.tolist()) == "is 0?"
    write_rows(tmp_path / "prompts.jsonl", [{"id": "talk", "turns": ["a", "b"]}])
    with pytest.raises(DataError, match="prompt 'talk': raw mode takes one plain text"):
        _prepare(tmp_path, "turns", loader=base, raw=True)


def test_conversation_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    """Guards against a template's exception without the row that caused it."""
    strict = "{% if messages[0].role == 'tool' %}{{ raise_exception('tools come later') }}{% endif %}{{ messages }}"
    write_rows(
        tmp_path / "prompts.jsonl",
        [{"id": "t", "messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "hi"}]}],
    )
    with pytest.raises(DataError, match=r"prompt 't': .*refuses the roles tool, user .*tools come later"):
        _prepare(tmp_path, "out", loader=loader(tokenizer=tiny_tokenizer(strict)))


def test_folder_belongs_to_one_process_and_one_run(tmp_path: Path) -> None:
    """Guards against two processes that write the same shards, and against a folder with foreign files."""
    (tmp_path / "out").mkdir()
    with (
        FileLock(tmp_path / "out" / ".lock"),
        pytest.raises(DataError, match="another prepare run works in this folder"),
    ):
        _prepare(tmp_path, "out")
    _prepare(tmp_path, "out")
    (tmp_path / "foreign").mkdir()
    write_rows(tmp_path / "foreign" / "x.jsonl", [])
    with pytest.raises(DataError, match=r"no run\.json"):
        _prepare(tmp_path, "foreign")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="Choose a folder that can be written"):
        _prepare(tmp_path, "file")


def test_finished_run_in_another_dtype_is_refused(tmp_path: Path) -> None:
    """Guards against an option that has no effect: a finished folder returns without loading anything."""
    _prepare(tmp_path, "out")
    assert _prepare(tmp_path, "out", dtype="fp32").num_resumed_shards == 3
    with pytest.raises(DataError, match="dtype was 'float32', now 'bfloat16'"):
        _prepare(tmp_path, "out", dtype="bf16")


def test_target_is_found_by_name_when_no_loader_is_given(tmp_path: Path) -> None:
    """Guards against a default loader that no test ever reaches: a target saved to a folder and named by it."""
    target = tiny_target()
    target.model.save_pretrained(tmp_path / "model")
    target.tokenizer.save_pretrained(tmp_path / "model")
    _prepare(tmp_path, "own")
    options = {**OPTIONS, "dtype": "fp32", "device": "cpu"}
    prepare(tmp_path / "prompts.jsonl", tmp_path / "named", str(tmp_path / "model"), **options)
    assert list(read_answers(tmp_path / "named")) == list(read_answers(tmp_path / "own"))
    with pytest.raises(ModelError):
        prepare(tmp_path / "prompts.jsonl", tmp_path / "none", str(tmp_path / "absent"), **options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"batch_size": 0},
        {"shard_size": -1},
        {"max_prompt_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"seed": -1},
        {"limit": 0},
    ],
)
def test_option_out_of_range_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Guards against an option that fails later, or not at all; nothing may be created before."""
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        _prepare(tmp_path, "out", **wrong)
    assert not (tmp_path / "out").exists()
