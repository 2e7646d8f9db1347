"""`dflash bench`: plain and speculative decoding side by side on one engine or server, with a record and a report."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash.__main__ import EXIT_INTERRUPTED
from dflash.cli.bench_options import MeasuringOptions, QuestionOptions, RecordOptions, ServerOptions
from dflash.cli.errors import say
from dflash.cli.options import DEFAULT_TARGET, ModelOptions, with_options
from dflash.cli.progress import counting, working
from dflash.errors import ConfigError
from dflash.registry import BENCH_BACKENDS, load_attribute
from dflash.resolve import AUTO
from dflash.types import Drafting

if TYPE_CHECKING:
    from dflash.bench.protocol import Backend, BackendOptions
    from dflash.bench.record import RunRecord
    from dflash.bench.run import Finished
    from dflash.bench.runner import Tick
    from dflash.bench.workload import Workload

EXIT_INCOMPLETE = 3
"""Requests failed, or the engine was gone before the end; what was measured is kept."""
UNWRAPPED = 200
"""Columns of a table that goes to a file or a pipe."""
_SERVERS = ("openai", "vllm", "sglang")
DEFAULT_FOLDER = Path("runs") / "bench"


@with_options
def bench(
    *,
    backend: Annotated[
        str, typer.Option("--backend", metavar="NAME", help=f"What is measured: {', '.join(BENCH_BACKENDS)}.")
    ] = "torch",
    model: ModelOptions,
    server: ServerOptions,
    questions: QuestionOptions,
    measuring: MeasuringOptions,
    record: RecordOptions,
) -> None:
    """Measure plain and speculative decoding side by side.

    Without options: a few built-in prompts, the shipped pair, a table and a report in under three minutes on two cores.
    Runs of the forms alternate; a speed-up is over the fastest plain form of the same run. Everything is kept in
    record.jsonl; `dflash report` shows several records together. Exit code 3: some requests failed, or the engine was
    gone before the end.
    """
    from dflash.bench.run import run_benchmark

    if backend not in BENCH_BACKENDS:
        raise ConfigError(f"--backend {backend!r} is unknown; choose one of {', '.join(BENCH_BACKENDS)}.")
    workload = _workload(questions, measuring)
    folder = _folder(record)
    with working("starting") as progress:
        options = _backend_options(backend, model, server)
        opened: Backend = load_attribute(BENCH_BACKENDS[backend])(options, progress)
    with contextlib.closing(opened), _progress(opened, workload, measuring.form) as tick:
        finished = run_benchmark(
            backend,
            opened,
            workload,
            folder,
            form_names=measuring.form,
            command=_command(sys.argv[1:]),
            resume=record.resume is not None,
            tick=tick,
        )
    _write_report(finished.record, folder)
    if record.as_json:
        typer.echo(finished.record.model_dump_json())
    else:
        _print(finished.record, folder)
    _leave(finished, folder)


def _command(words: Sequence[str]) -> str:
    """The command line for the record, without names and passwords inside of addresses."""
    return shlex.join(["dflash", *(re.sub(r"://[^/@]*@", "://", word) for word in words)])


def _workload(questions: QuestionOptions, measuring: MeasuringOptions) -> Workload:
    from dflash.bench.datasets.base import BUILT_IN, load_questions
    from dflash.bench.workload import Workload

    limit = questions.prompts_per_set()
    names = questions.dataset or [BUILT_IN]
    if len(set(names)) < len(names):
        raise ConfigError("--dataset names a set twice; leave one out.")
    if questions.data_dir is not None and all(name == BUILT_IN or name.endswith(".jsonl") for name in names):
        raise ConfigError("--data-dir has no effect without a published set: name one with --dataset.")
    return Workload(
        questions=tuple(load_questions(name, data_dir=questions.data_dir, limit=limit) for name in names),
        sampling=questions.sampling(),
        loads=measuring.loads(),
        repeats=measuring.repeats,
        warm_up_tokens=measuring.warm_up,
    )


def _folder(record: RecordOptions) -> Path:
    if record.resume is not None:
        if record.out not in (None, record.resume):
            raise ConfigError("--resume goes on in its own folder; leave --out out.")
        return record.resume
    if record.out is not None:
        return record.out
    return DEFAULT_FOLDER / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")


def _backend_options(backend: str, model: ModelOptions, server: ServerOptions) -> BackendOptions:
    """A server runs what it runs: the default pair is not passed to it."""
    from dflash.bench.protocol import BackendOptions

    is_server = backend in _SERVERS
    return BackendOptions(
        target=None if is_server and model.target == DEFAULT_TARGET and model.draft == AUTO else model.target,
        draft=None if model.draft == AUTO else model.draft,
        dtype=model.dtype,
        device=model.device,
        threads=model.threads,
        width=model.width,
        trust_remote_code=model.trust_remote_code,
        drafting=_drafting(model),
        url=server.url,
        plain_url=server.plain_url,
        model=server.served_model,
        api_key=server.api_key(),
        stream=server.stream,
        tokenizer=server.tokenizer,
        timeout=server.timeout,
    )


def _drafting(model: ModelOptions) -> Drafting | None:
    """What was said about drafting; None if nothing was, so that servers need not refuse it. The width has its own."""
    said = dataclasses.replace(model.drafting(), width=None)
    return None if said == Drafting() else said


def _progress(backend: Backend, workload: Workload, forms: list[str]) -> contextlib.AbstractContextManager[Tick]:
    """Requests that are done, of all."""
    from dflash.bench.workload import chosen_forms

    turns = sum(len(one.turns) for questions in workload.questions for one in questions.conversations)
    total = turns * workload.repeats * len(workload.loads) * len(chosen_forms(backend.forms, forms))
    return counting("warming up", total)


def _write_report(record: RunRecord, folder: Path) -> None:
    from dflash.bench.report.write import write_report

    write_report([record], folder)


def _print(record: RunRecord, folder: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    from dflash.bench.report.tables import summary_table

    console = Console()
    if not console.is_terminal:
        console = Console(width=UNWRAPPED)
    engine = record.engine
    parts = [engine.engine, engine.target.name if engine.target else "", engine.dtype, engine.device]
    threads = None if engine.num_threads is None else f"{engine.num_threads} thread(s)"
    console.print(" · ".join(filter(None, [*parts, threads])), markup=False, highlight=False, soft_wrap=True)
    words = summary_table(record)
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    headings = words.headings[words.num_named :]
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    for name, rows in words.grouped():
        table.add_row(Text(name, style="bold"))
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    for note in record.notes:
        console.print(f"· {note}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"record and report: {folder}", markup=False, highlight=False, soft_wrap=True)


def _leave(finished: Finished, folder: Path) -> None:
    """The exit code, with a line that says why it is not 0."""
    record = finished.record
    num_failed = sum(sum(figures.failures.values()) for cell in record.cells for figures in cell.forms)
    go_on = f"go on with the same options and --resume {folder}"
    if finished.outcome.interrupted:
        say(f"stopped; what was measured is in {folder}; {go_on}.")
        raise typer.Exit(EXIT_INTERRUPTED)
    if record.stopped_by is not None:
        say(f"error: {record.stopped_by} What was measured is in {folder}; {go_on}.")
        raise typer.Exit(EXIT_INCOMPLETE)
    if num_failed:
        say(f"{num_failed} requests failed; they are named in {folder}; ask them again: {go_on}.")
        raise typer.Exit(EXIT_INCOMPLETE)
