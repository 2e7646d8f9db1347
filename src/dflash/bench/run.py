"""A whole run: warm up, ask, put the figures together, keep the record: `dflash bench` once its backend is open."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash.bench.figures import cells
from dflash.bench.journal import Journal
from dflash.bench.protocol import Backend, BackendInfo, Form, ModelInfo
from dflash.bench.provenance import git_revision, machine, package_versions
from dflash.bench.record import (
    BatchPart,
    DataSetPart,
    EnginePart,
    FormPart,
    ModelPart,
    ProvenancePart,
    RunRecord,
    SettingsPart,
)
from dflash.bench.runner import Outcome, Runner, Tick
from dflash.bench.workload import Workload, chosen_forms
from dflash.prepare.jsonl import write_atomically

JOURNAL_FILE = "batches.jsonl"
RECORD_FILE = "record.jsonl"
REPORT_FILE = "report.html"
TABLE_FILE = "report.md"


@dataclass(frozen=True)
class Finished:
    """A run's record and how it ended."""

    record: RunRecord
    outcome: Outcome


def run_benchmark(
    backend_name: str,
    backend: Backend,
    workload: Workload,
    folder: Path,
    *,
    command: str,
    form_names: Sequence[str] = (),
    resume: bool = False,
    tick: Tick = lambda what, number: None,
) -> Finished:
    """Ask everything and write `folder`/record.jsonl.

    Args:
        form_names: forms to be measured; empty = those that the backend measures by default.

    Raises: RequestFailed if the backend cannot even warm up, ConfigError for unknown forms, the journal's errors.
    """
    started = datetime.datetime.now(datetime.UTC)
    info = backend.info()  # now, because afterwards the engine may be gone
    forms = chosen_forms(backend.forms, form_names)
    journal = Journal(folder / JOURNAL_FILE, fingerprint(backend_name, forms, workload, info))
    done: Sequence[BatchPart] = ()
    runner = Runner(backend, workload, journal, forms=forms)
    if resume:
        done = journal.resume()
    else:
        journal.refuse_existing()  # before the warm-up takes its time
    runner.warm_up()
    if not resume:
        journal.start()
    outcome = runner.run(done, tick)
    seconds = journal.seconds + (datetime.datetime.now(datetime.UTC) - started).total_seconds()
    record = make_record(
        _engine_part(backend_name, backend, forms, info),
        workload,
        outcome,
        info.notes,
        ProvenancePart(
            command=command,
            started=started.isoformat(timespec="seconds"),
            seconds=seconds,
            git_revision=git_revision(),
            versions=package_versions(),
            machine=machine(),
        ),
    )
    write_atomically(folder / RECORD_FILE, (record.model_dump_json() + "\n").encode())
    return Finished(record, outcome)


def fingerprint(backend_name: str, forms: Sequence[Form], workload: Workload, info: BackendInfo) -> str:
    """Of everything that two sittings of one run must share. A server's address is not part of it."""
    ran = [backend_name, info.engine, repr(info.target), repr(info.draft), info.dtype, info.device, info.num_threads]
    asked = workload.fingerprint(forms)
    return hashlib.sha256(json.dumps([asked, *ran]).encode()).hexdigest()


def make_record(
    engine: EnginePart, workload: Workload, outcome: Outcome, notes: Sequence[str], provenance: ProvenancePart
) -> RunRecord:
    """The record of what was asked and answered; `notes` are the backend's."""
    sampling = workload.sampling
    return RunRecord(
        finished=outcome.stopped_by is None,
        stopped_by=outcome.stopped_by,
        provenance=provenance,
        engine=engine,
        data_sets=[
            DataSetPart(
                name=one.name,
                origin=one.origin,
                licence=one.licence,
                sha256=one.sha256,
                num_prompts=len(one.conversations),
                num_available=one.num_available,
            )
            for one in workload.questions
        ],
        settings=SettingsPart(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            ignore_eos=sampling.ignore_eos,
            thinking=sampling.thinking,
            loads=list(workload.loads),
            repeats=workload.repeats,
            warm_up_tokens=workload.warm_up_tokens,
        ),
        cells=cells(
            outcome.batches,
            engine.forms,
            compare_drawn=None if sampling.temperature == 0 else engine.same_seed_same_text,
        ),
        notes=[*notes, *_notes(workload, outcome, engine)],
        batches=outcome.batches,
    )


def _engine_part(backend_name: str, backend: Backend, forms: Sequence[Form], info: BackendInfo) -> EnginePart:
    def model(one: ModelInfo | None) -> ModelPart | None:
        return None if one is None else ModelPart(name=one.name, revision=one.revision, sha256=one.sha256)

    return EnginePart(
        backend=backend_name,
        engine=info.engine,
        forms=[
            FormPart(name=one.name, kind=one.kind, description=one.description, reference=one.reference)
            for one in forms
        ],
        target=model(info.target),
        draft=model(info.draft),
        block_size=info.block_size,
        dtype=info.dtype,
        device=info.device,
        num_threads=info.num_threads,
        details=dict(info.details),
        same_seed_same_text=backend.same_seed_same_text,
    )


def _notes(workload: Workload, outcome: Outcome, engine: EnginePart) -> list[str]:
    """What was cut or is missing, in sentences."""
    notes = []
    for one in workload.questions:
        if len(one.conversations) < one.num_available:
            notes.append(
                f"{one.name}: {len(one.conversations)} of its {one.num_available} prompts were asked (--limit)."
            )
    answered = [request for batch in outcome.batches for request in batch.requests if request.failure is None]
    cut = sum(request.finish_reason == "length" for request in answered)
    if cut:
        limit = workload.sampling.max_new_tokens
        notes.append(f"{cut} of {len(answered)} answers were cut at {limit} tokens (--max-new-tokens).")
    uncounted = sum(request.num_tokens is None for request in answered)
    if uncounted:
        notes.append(
            f"{uncounted} answers came without a number of tokens, so they have no speed: name a --tokenizer to count."
        )
    for remark, number in Counter(request.remark for request in answered if request.remark is not None).items():
        notes.append(f"{number} answers: {remark}")
    kinds = {form.kind for form in engine.forms}
    if kinds == {"speculative"}:
        notes.append("No plain form was measured (--plain-url), so there is no speed-up.")
    if kinds == {"plain"}:
        notes.append("No speculative form was measured (--url), so there is no speed-up.")
    if workload.sampling.temperature > 0 and not engine.same_seed_same_text:
        notes.append("Drawn at a temperature above 0, outputs of this backend's forms cannot be compared.")
    if workload.repeats == 1:
        notes.append("Everything was asked once (--repeats), so nothing is said about how steady the machine was.")
    failed = [request for batch in outcome.batches for request in batch.requests if request.failure is not None]
    if failed:
        first = failed[0]
        notes.append(f"{len(failed)} requests failed; the first, {first.prompt_id}: {first.message}")
    if outcome.stopped_by is not None:
        notes.append(f"The run is not complete: {outcome.stopped_by}")
    return notes
