"""A draft trained here, served unchanged by the real vLLM (its CPU build): same text, same acceptance, counters read.

Started by `dflash launch` itself, so that its command, its wait for health and its stop are what is tested. Float32 and
greedy: there, a served text has to be ours to the token. Minutes; run by `make test-engines`.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import dflash
from dflash import Drafting, SamplingParams
from dflash.bench.record import RunRecord
from dflash.launch.server import healthy
from dflash.prepare.prompts import read_prompts
from dflash.registry import DRAFTS, TARGETS
from dflash.resolve import resolve_draft, resolve_target
from tests.engines import client
from tests.launch.test_server import free_port

TARGET = "smollm2-135m"
PROMPTS = Path(dflash.__file__).parent / "data" / "prompts" / "bench.jsonl"
NUM_PROMPTS, NUM_TOKENS = 4, 48
READY_SECONDS, STOP_SECONDS, BENCH_SECONDS = 600.0, 90.0, 600.0
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "2")
SAME_ACCEPTANCE = 0.03
"""Relative. vLLM counts what a last round accepted beyond the limit."""

pytestmark = pytest.mark.engines


@dataclass(frozen=True)
class Ours:
    """This package's own answers to the same prompts."""

    texts: list[str]
    token_ids: list[list[int]]
    num_rounds: int
    num_accepted: int

    @property
    def acceptance_length(self) -> float:
        return 1 + self.num_accepted / self.num_rounds


@dataclass(frozen=True)
class Theirs:
    """The server's answers, its counters over them, and what the benchmark made of the same questions."""

    answers: list[client.Served]
    counters: dict[str, int]
    record: RunRecord

    @property
    def acceptance_length(self) -> float:
        return 1 + self.counters["num_accepted_tokens"] / self.counters["num_drafts"]


def test_the_shipped_draft(vllm_python: Path, tmp_path: Path) -> None:
    """Guards against a layout that only this package reads, a tap that vLLM takes elsewhere, and one token too many or
    too few per block: each of them leaves the text right and costs speed."""
    compare(vllm_python, resolve_draft("auto", resolve_target(TARGET)).path, tmp_path)


def test_the_other_kind_of_last_tap(vllm_python: Path, tmp_path: Path) -> None:
    """Guards against reading the target's last layer after the final norm in one engine and before it in the other, or
    mending one kind of draft only: the shipped draft with its deepest tap moved to, or away from, the last layer."""
    shipped = resolve_draft("auto", resolve_target(TARGET)).path
    draft = tmp_path / "draft"
    shutil.copytree(shipped, draft)
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    taps = config["dflash_config"]["target_layer_ids"]
    last = config["num_target_layers"] - 1
    taps[-1] = last if taps[-1] != last else last - 1
    (draft / "config.json").write_text(json.dumps(config), encoding="utf-8")
    compare(vllm_python, draft, tmp_path)


def compare(vllm_python: Path, draft: Path, folder: Path) -> None:
    """Serve the target with `draft`, ask, and compare with this package's own plain text and acceptance."""
    ours = decode(as_vllm_runs_it(draft, folder / "ours"))
    theirs = serve_and_ask(vllm_python, draft, folder)
    assert [answer.token_ids for answer in theirs.answers] == ours.token_ids
    assert [answer.text for answer in theirs.answers] == ours.texts
    assert theirs.counters["num_draft_tokens"] > theirs.counters["num_accepted_tokens"] > 0
    assert theirs.acceptance_length == pytest.approx(ours.acceptance_length, rel=SAME_ACCEPTANCE)
    check_record(theirs.record, ours)


def as_vllm_runs_it(draft: Path, folder: Path) -> Path:
    """A copy of `draft` with which this package proposes the very tokens that vLLM does: every token is scored, and a
    slot does not see those behind it. The latter is a fault of vLLM 0.32's CPU attention, which is told `causal=False`
    and stays causal: only the acceptance length shows it (docs/serving.md)."""
    shutil.copytree(draft, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["dflash_config"].pop("draft_vocabulary_file", None)
    config["dflash_config"]["causal"] = True
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def check_record(record: RunRecord, ours: Ours) -> None:
    """`dflash bench --backend vllm` saw the same answers and the same acceptance."""
    assert record.finished
    assert record.engine.engine.startswith("vLLM 0.32")
    (cell,) = record.cells
    (figures,) = [one for one in cell.forms if one.form == "speculative"]
    assert figures.num_done == figures.num_requests == NUM_PROMPTS
    requests = [request for batch in record.batches for request in batch.requests]
    assert [request.token_ids for request in requests] == ours.token_ids
    assert [request.text for request in requests] == ours.texts
    assert figures.rounds is not None and figures.rounds.accepted_per_slot is not None
    assert sum(figures.rounds.accepted_per_slot) == figures.rounds.num_accepted
    assert figures.acceptance_length == pytest.approx(ours.acceptance_length, rel=SAME_ACCEPTANCE)
    assert all(request.first_token_seconds is not None for request in requests)


def decode(draft: Path) -> Ours:
    """Plain text, and the speculation that repeats it."""
    engine = dflash.load(
        TARGET, str(draft), dtype="float32", device="cpu", drafting=Drafting(fixed=True)
    )  # as vLLM does
    params = SamplingParams(max_new_tokens=NUM_TOKENS)
    plain = [engine.generate(prompt, params, use_draft=False) for prompt in prompts()]
    drafted = [engine.generate(prompt, params) for prompt in prompts()]
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    return Ours(
        texts=[result.text for result in plain],
        token_ids=[list(result.token_ids) for result in plain],
        num_rounds=sum(result.stats.num_rounds for result in drafted),
        num_accepted=sum(result.stats.num_accepted for result in drafted),
    )


def serve_and_ask(vllm_python: Path, draft: Path, folder: Path) -> Theirs:
    """Every prompt once, alone, and what the counters rose by meanwhile; then all of it again by the benchmark."""
    with launched(vllm_python, draft, folder / "vllm.log") as url:
        before = client.counters(url)
        answers = [client.ask(url, TARGET, prompt, NUM_TOKENS) for prompt in prompts()]
        after = client.counters(url)
        record = measure(url, folder)
    return Theirs(answers, {name: after[name] - before[name] for name in after}, record)


def measure(url: str, folder: Path) -> RunRecord:
    """`dflash bench` on the running server."""
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts()), encoding="utf-8")
    words = ["bench", "--backend", "vllm", "--url", url, "--dataset", str(questions), "--limit", str(NUM_PROMPTS)]
    words += ["--max-new-tokens", str(NUM_TOKENS), "--repeats", "1", "--warm-up", "0", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "dflash", *words, "--out", str(folder / "run")],
        capture_output=True,
        text=True,
        timeout=BENCH_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return RunRecord.model_validate_json(done.stdout)


@contextmanager
def launched(vllm_python: Path, draft: Path, log: Path) -> Iterator[str]:
    """`dflash launch vllm` as a user runs it, stopped by Ctrl-C; nothing may be left of it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ["launch", "vllm", TARGET, str(draft), "--platform", "cpu", "--python", str(vllm_python)]
    with log.open("wb") as output:
        command = subprocess.Popen(
            [sys.executable, "-m", "dflash", *words, "--port", str(port), "--", *FLAGS],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        _wait_until_ready(command, url, log)
        members = _processes_of(str(port))
        yield url
    finally:
        command.send_signal(signal.SIGINT)
        code = command.wait(STOP_SECONDS)
    assert code == 130
    assert members
    assert not _processes_of(str(port))
    assert not healthy(f"{url}/health")


def _wait_until_ready(command: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while f"ready on {url}" not in log.read_text(encoding="utf-8", errors="replace"):
        assert command.poll() is None, log.read_text(encoding="utf-8", errors="replace")[-4000:]
        assert time.monotonic() < deadline, "vLLM did not start in time"
        time.sleep(0.5)


def _processes_of(port: str) -> list[int]:
    """Processes of the server on this port, by their command lines."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:  # ended meanwhile
            continue
        if b"vllm.entrypoints.openai.api_server" in words and port.encode() in words:
            found.append(int(entry.parent.name))
    return found


def prompts() -> list[str]:
    """A few of the benchmark's built-in prompts, of different kinds."""
    rows = read_prompts(PROMPTS)
    return [row.turns[0] for row in rows[:: len(rows) // NUM_PROMPTS]][:NUM_PROMPTS]


def test_there_is_a_pair_to_serve() -> None:
    """Guards against the tests above being about a pair that is no longer shipped."""
    assert TARGET in TARGETS
    assert any(TARGET in entry.targets for entry in DRAFTS.values())
