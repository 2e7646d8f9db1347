"""`dflash bench` and `dflash report` as a user sees them: tables, files, exit codes, and errors of one line."""

from __future__ import annotations

import _thread
import dataclasses
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dflash.bench.protocol import BackendOptions, Form, Request, RequestFailed
from dflash.bench.record import RunRecord
from dflash.cli import bench
from dflash.cli.bench_options import DEFAULT_LIMIT, DEFAULT_REPEATS, DEFAULT_TOKENS
from dflash.registry import BENCH_BACKENDS
from dflash.types import Drafting
from tests.backends.tiny_pair import save_draft, save_target
from tests.bench import fake_server
from tests.bench.fakes import FakeBackend, echo
from tests.cli.fakes import CommandLine, Outcome

FORMS = 3
REAL_PAGE = bench._write_report


@dataclass
class Bench:
    """The command over a fake backend, with its files below a temporary folder."""

    cli: CommandLine
    folder: Path
    backend: FakeBackend = field(default_factory=FakeBackend)
    options: list[BackendOptions] = field(default_factory=list)

    def run(self, *words: str, out: str = "run") -> Outcome:
        return self.cli.run("bench", *words, *([] if "--resume" in words else ["--out", str(self.folder / out)]))

    def record(self, out: str = "run") -> RunRecord:
        return RunRecord.model_validate_json((self.folder / out / "record.jsonl").read_text(encoding="utf-8"))


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the report out: drawing it takes longer than everything else, and it has tests of its own."""
    monkeypatch.setattr(bench, "_write_report", lambda record, folder: None)


@pytest.fixture
def fake(no_page: None, cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(cli, tmp_path)

    def load(reference: str) -> Any:
        def open_backend(options: BackendOptions, progress: Any) -> FakeBackend:
            made.options.append(options)
            return made.backend

        return open_backend

    monkeypatch.setattr(bench, "load_attribute", load)
    return made


def test_without_options(fake: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a default run that takes long, measures one kind of prompt, or leaves no record and report."""
    monkeypatch.setattr(bench, "_write_report", REAL_PAGE)
    outcome = fake.run()
    assert outcome.code == 0, outcome.err
    for part in ("speed-up", "dflash", "plain-exact, fastest", "fake-target", "8 of its 40 prompts"):
        assert part in outcome.out
    record = fake.record()
    assert record.finished
    assert record.data_sets[0].num_prompts == DEFAULT_LIMIT
    # at 14 tokens/s on two cores: 1.8 minutes, loading and prompts not counted; the limit is three
    assert DEFAULT_LIMIT * DEFAULT_TOKENS * DEFAULT_REPEATS * FORMS / 14 <= 120
    assert {path.name for path in (fake.folder / "run").iterdir()} == {
        "record.jsonl", "report.html", "report.md", "batches.jsonl",
    }  # fmt: skip
    assert fake.backend.closed
    assert fake.options[0].target == "smollm2-135m"


def test_options_reach_what_they_are_about(fake: Bench, tmp_path: Path) -> None:
    """Guards against options that are accepted and lost."""
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n{"prompt": "Three?"}\n', encoding="utf-8")
    words = "--limit 2 -n 9 --temperature 0.5 --top-p 0.9 --top-k 7 --seed 4 --ignore-eos --no-thinking"
    more = "--repeats 1 --warm-up 0 --target t --draft d --dtype float32 --threads 1 --json"
    outcome = fake.run("--dataset", str(prompts), *words.split(), *more.split())
    record = RunRecord.model_validate_json(outcome.out)
    assert record == fake.record()
    sampling = fake.backend.calls[0][1].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 7)
    assert (sampling.seed, sampling.ignore_eos, sampling.thinking) == (4, True, False)
    assert len(fake.backend.calls) == 2 * FORMS
    assert fake.options[0] == BackendOptions(target="t", draft="d", dtype="float32", threads=1)
    fake.run("--dataset", str(prompts), "--full", "--repeats", "1", "--warm-up", "0", out="full")
    assert fake.record("full").data_sets[0].num_prompts == 3


def test_servers_are_not_sent_the_default_pair(fake: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the built-in target standing in the record of somebody else's server."""
    monkeypatch.setenv("MY_KEY", "secret")
    fake.backend.max_concurrency = 8
    words = "--backend vllm --url http://a:1 --plain-url http://b:1 --model m --api-key-env MY_KEY --no-stream"
    outcome = fake.run(*words.split(), "--timeout", "9", "--concurrency", "1,2", "--limit", "2", "--repeats", "1")
    assert outcome.code == 0, outcome.err
    (options,) = fake.options
    assert (options.target, options.draft) == (None, None)
    assert (options.url, options.plain_url, options.model) == ("http://a:1", "http://b:1", "m")
    assert (options.api_key, options.stream, options.timeout) == ("secret", False, 9.0)
    assert [cell.load.label for cell in fake.record().cells] == ["1 at once", "2 at once"]
    assert "secret" not in (fake.folder / "run" / "record.jsonl").read_text(encoding="utf-8")


def test_drafting_options_reach_the_engine(fake: Bench) -> None:
    """Guards against --fixed that the benchmark ignores, and against defaults that a server would have to refuse."""
    fake.run("--limit", "1", "--fixed")
    fake.run("--limit", "1", "--width", "4", out="two")
    assert fake.options[0].drafting == Drafting(fixed=True)
    assert (fake.options[1].drafting, fake.options[1].width) == (None, 4)


def test_chosen_forms(fake: Bench) -> None:
    """Guards against --form that is ignored, and a form that is measured without being asked for."""
    rare = Form(name="rare", kind="speculative", description="not by default")
    fake.backend.forms = (*fake.backend.forms, dataclasses.replace(rare, by_default=False))
    assert fake.run("--limit", "1").code == 0
    assert {form for form, _ in fake.backend.calls} == {"plain", "plain-exact", "dflash"}
    del fake.backend.calls[:]
    assert fake.run("--limit", "1", "--form", "dflash", "--form", "plain", out="two").code == 0
    assert {form for form, _ in fake.backend.calls} == {"plain", "dflash"}
    assert [form.name for form in fake.record("two").engine.forms] == ["plain", "dflash"]


def test_no_password_in_the_record(fake: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against credentials in a record that is published."""
    monkeypatch.setattr(sys, "argv", ["dflash", "bench", "--url", "http://me:secret@host:1/v1"])
    fake.run("--limit", "1")
    assert fake.record().provenance.command == "dflash bench --url http://host:1/v1"


WRONG: dict[str, tuple[str, ...]] = {
    "unknown; choose one of torch": ("--backend", "tensorrt"),
    "is unknown. Known: built-in": ("--dataset", "gsm9k"),
    "names a set twice": ("--dataset", "built-in", "--dataset", "built-in"),
    "contradict one another; leave": ("--full", "--limit", "3"),
    "--rate and --concurrency": ("--rate", "2", "--concurrency", "2"),
    "takes numbers such as": ("--concurrency", "many"),
    "one request at a time": ("--concurrency", "4"),
    "--repeats must be": ("--repeats", "0"),
    "--max-new-tokens must be": ("-n", "0"),
    "limit must be at least 1": ("--limit", "0"),
    "is not set": ("--api-key-env", "NO_SUCH_VARIABLE_ANYWHERE"),
    "--data-dir has no effect": ("--data-dir", "."),
    "none of this backend's forms: plain": ("--form", "fast"),
    "Give the folder": ("--resume", "nowhere"),
}


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_are_one_line(message: str, fake: Bench) -> None:
    """Guards against tracebacks, and against options that are ignored."""
    outcome = fake.run(*WRONG[message])
    assert outcome.code == 2
    assert message in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1


def test_failed_requests_give_exit_code_3(fake: Bench) -> None:
    """Guards against a script that takes a run with failures for a good one."""

    def say(request: Request, form: str, call: int) -> str:
        if call == 6:
            raise RequestFailed("server error", "HTTP 500")
        return echo(request, form, call)

    fake.backend.say = say
    outcome = fake.run("--limit", "2", "--warm-up", "0")
    assert outcome.code == 3
    assert "1 requests failed" in outcome.err
    assert "1 server error" in outcome.out


def test_a_run_that_was_stopped_is_kept_and_resumed(fake: Bench) -> None:
    """Guards against Ctrl-C that loses the run, and a hint that does not work."""
    pressed: list[int] = []

    def say(request: Request, form: str, call: int) -> str:
        if call == 7 and not pressed:
            pressed.append(call)
            raise KeyboardInterrupt
        return echo(request, form, call)

    fake.backend.say = say
    words = ("--limit", "3", "--warm-up", "0")
    outcome = fake.run(*words)
    assert outcome.code == 130
    assert f"--resume {fake.folder / 'run'}" in outcome.err
    assert "dflash" in outcome.out
    assert not fake.record().finished
    assert fake.run(*words, "--resume", str(fake.folder / "run")).code == 0
    assert fake.record().finished
    assert len(fake.backend.calls) == 3 * FORMS * DEFAULT_REPEATS + 1


def test_an_engine_that_is_gone(fake: Bench) -> None:
    """Guards against exit code 0, or an empty record, after a server has died."""

    def say(request: Request, form: str, call: int) -> str:
        if call >= 4:
            raise RequestFailed("connection", "nobody answers at http://a:1; start the server.", fatal=True)
        return echo(request, form, call)

    fake.backend.say = say
    outcome = fake.run("--limit", "3", "--warm-up", "0")
    assert outcome.code == 3
    assert "does not answer any more" in outcome.err
    assert sum(len(batch.requests) for batch in fake.record().batches) == 5


def test_an_engine_that_never_answers(fake: Bench) -> None:
    """Guards against a run folder for a server that was never there."""

    def say(request: Request, form: str, call: int) -> str:
        raise RequestFailed("connection", "nobody answers at http://a:1; start the server.", fatal=True)

    fake.backend.say = say
    outcome = fake.run()
    assert outcome.code == 2
    assert "nobody answers" in outcome.err
    assert not (fake.folder / "run").exists()


def test_against_a_real_server(no_page: None, cli: CommandLine, tmp_path: Path) -> None:
    """Guards against parts that fit the fakes only: HTTP, streams, usage, two servers, a load, record and report."""
    with fake_server.serving(fake_server.answers()) as plain, fake_server.serving(fake_server.answers()) as drafted:
        words = f"--backend openai --url {drafted.url} --plain-url {plain.url} --limit 3 --repeats 1 --concurrency 1,3"
        outcome = cli.run("bench", *words.split(), "--out", str(tmp_path / "run"))
    assert outcome.code == 0, outcome.err
    assert len(plain.bodies) == len(drafted.bodies) == 1 + 2 * 3
    record = RunRecord.model_validate_json((tmp_path / "run" / "record.jsonl").read_text(encoding="utf-8"))
    for cell in record.cells:
        figures = {one.form: one for one in cell.forms}["speculative"]
        assert figures.num_tokens == 3 * fake_server.NUM_TOKENS
        assert figures.identity is not None and figures.identity.num_same == 3
        assert figures.acceptance_length is None
        assert figures.speedup is not None
    assert any("does not tell acceptance" in note for note in record.notes)


def test_a_server_that_dies_on_the_way(no_page: None, cli: CommandLine, tmp_path: Path) -> None:
    """Guards against an unbounded wait, and against what was measured before being lost."""
    answering = fake_server.answers(pause=0.0)

    def chat(server: fake_server.FakeServer, handler: fake_server.Handler, body: dict[str, Any]) -> None:
        (fake_server.die if len(server.bodies) > 4 else answering)(server, handler, body)

    with fake_server.serving(chat, metrics="up 1\n", version={"version": "0"}) as server:
        words = f"--backend vllm --url {server.url} --limit 8 --repeats 1 --timeout 60"
        outcome = cli.run("bench", *words.split(), "--out", str(tmp_path / "run"))
    assert outcome.code == 3
    assert "nobody answers at" in outcome.err
    record = RunRecord.model_validate_json((tmp_path / "run" / "record.jsonl").read_text(encoding="utf-8"))
    (cell,) = record.cells
    (figures,) = cell.forms
    assert (figures.num_done, figures.failures) == (3, {"connection": 1})


def test_ctrl_c_while_a_server_hangs(no_page: None, cli: CommandLine, tmp_path: Path) -> None:
    """Guards against a key that is heard only when the time limit of the request is over."""
    answering = fake_server.answers(pause=0.0)

    def chat(server: fake_server.FakeServer, handler: fake_server.Handler, body: dict[str, Any]) -> None:
        if len(server.bodies) < 5:
            answering(server, handler, body)
            return
        _thread.interrupt_main()
        fake_server.hang(server, handler, body)

    started = time.perf_counter()
    with fake_server.serving(chat) as server:
        words = f"--backend openai --url {server.url} --limit 8 --repeats 1 --timeout 150"
        outcome = cli.run("bench", *words.split(), "--out", str(tmp_path / "run"))
    assert outcome.code == 130
    assert time.perf_counter() - started < 120
    record = RunRecord.model_validate_json((tmp_path / "run" / "record.jsonl").read_text(encoding="utf-8"))
    assert record.cells[0].forms[0].num_done == 3
    assert not record.finished


def test_against_the_torch_engine(no_page: None, cli: CommandLine, tmp_path: Path) -> None:
    """Guards against parts that fit the fakes only: models, forms, ids, acceptance, times and memory in the record."""
    target, draft = save_target(tmp_path / "target"), save_draft(tmp_path / "draft")
    words = f"--target {target} --draft {draft} --dtype float32 --threads 1 --limit 2 -n 12 --repeats 1 --ignore-eos"
    outcome = cli.run("bench", *words.split(), "--out", str(tmp_path / "run"))
    assert outcome.code == 0, outcome.err
    record = RunRecord.model_validate_json((tmp_path / "run" / "record.jsonl").read_text(encoding="utf-8"))
    assert record.engine.target is not None and record.engine.target.sha256 is not None
    assert record.engine.draft is not None and record.engine.draft.sha256 is not None
    assert (record.engine.dtype, record.engine.num_threads) == ("float32", 1)
    (cell,) = record.cells
    drafted = {one.form: one for one in cell.forms}["dflash"]
    assert drafted.identity is not None and drafted.identity.num_same == drafted.identity.num_compared == 2
    assert drafted.num_tokens == 24
    assert drafted.acceptance_length is not None and drafted.acceptance_length >= 1
    assert drafted.speedup is not None and drafted.speedup.limit is not None
    assert drafted.looping_share is not None and drafted.peak_memory_bytes is not None


def test_report(fake: Bench, cli: CommandLine) -> None:
    """Guards against a report that does not say where it is, and a --table that writes files."""
    fake.run("--limit", "2")
    folder = str(fake.folder / "run")
    outcome = cli.run("report", folder, folder, "--out", str(fake.folder / "both"))
    assert outcome.code == 0
    assert outcome.out.splitlines() == [str(fake.folder / "both" / name) for name in ("report.html", "report.md")]
    table = cli.run("report", folder, "--table")
    assert table.out.startswith("| data set | form | speed-up |")
    wrong = cli.run("report", str(fake.folder / "nowhere.jsonl"))
    assert wrong.code == 2
    assert "nowhere.jsonl" in wrong.err


def test_every_backend_of_the_help_exists() -> None:
    """Guards against choices that no longer match the registry."""
    from dflash.registry import load_attribute

    for name in ("torch", "openai", "vllm", "sglang"):
        assert callable(load_attribute(BENCH_BACKENDS[name]))


def test_record_is_json_alone(fake: Bench) -> None:
    """Guards against notes or tables on standard output beside --json."""
    assert json.loads(fake.run("--json", "--limit", "1").out)["schema_version"] == "dflash-bench/1"
