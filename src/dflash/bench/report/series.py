"""From records to what the charts show: labels, numbers, the worst prompts. Draws nothing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from dflash.bench.record import SCHEMA, BatchPart, CellPart, FormFigures, RequestPart, RunRecord
from dflash.bench.sameness import first_difference
from dflash.errors import DataError
from dflash.prepare.jsonl import line_error, read_json_lines

NUM_WORST = 5


@dataclass(frozen=True)
class Labelled:
    """A record and its name in the report."""

    label: str
    record: RunRecord


@dataclass(frozen=True)
class Column:
    """A speculative form in one cell of one record."""

    label: str
    """Short: what tells it from the other columns of the report."""
    cell: CellPart
    figures: FormFigures


@dataclass(frozen=True)
class Point:
    """One prompt: what its rounds allow and what was measured."""

    limit: float
    measured: float
    label: str


@dataclass(frozen=True)
class Bad:
    """A prompt on which a speculative form did worst, or changed the text."""

    column: str
    prompt_id: str
    turn: int
    speedup: float | None
    acceptance_length: float | None
    position: int | None
    """Where the output first leaves the plain one's; None = the same."""
    unit: str
    plain: str
    speculative: str


def read_records(paths: Sequence[Path]) -> list[RunRecord]:
    """Every line of every file; a folder stands for its record.jsonl.

    Raises DataError: unreadable, no record, or a record of another schema version.
    """
    records = []
    for given in paths:
        path = given / "record.jsonl" if given.is_dir() else given
        for number, row in read_json_lines(path):
            if row.get("schema_version") != SCHEMA:
                raise line_error(path, number, f"holds no benchmark record of schema {SCHEMA}")
            try:
                records.append(RunRecord.model_validate(row))
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(map(str, first["loc"]))
                raise line_error(path, number, f"is no complete record ({place}: {first['msg']})") from error
    if not records:
        raise DataError("no records found: give folders or files that `dflash bench` has written.")
    return records


def labelled(records: Sequence[RunRecord]) -> list[Labelled]:
    """Name each record by its backend, numbered where that is not enough."""
    counts = Counter(record.engine.backend for record in records)
    seen: Counter[str] = Counter()
    found = []
    for record in records:
        name = record.engine.backend
        seen[name] += 1
        found.append(Labelled(name if counts[name] == 1 else f"{name} {seen[name]}", record))
    return found


def columns(records: Sequence[Labelled]) -> list[Column]:
    """All speculative forms, labelled by what differs between them."""
    found = [
        (one, cell, figures)
        for one in records
        for cell in one.record.cells
        for figures in cell.forms
        if kind_of(one.record, figures.form) == "speculative" and figures.num_done
    ]
    several_records = len(records) > 1
    several_loads = {one.label for one, _, _ in found if len(one.record.settings.loads) > 1}
    several_forms = len({figures.form for _, _, figures in found}) > 1 and not several_records
    return [
        Column(
            " · ".join(
                [
                    *([one.label] if several_records else []),
                    cell.data_set,
                    *([cell.load.short] if one.label in several_loads else []),
                    *([figures.form] if several_forms else []),
                ]
            ),
            cell,
            figures,
        )
        for one, cell, figures in found
    ]


def kind_of(record: RunRecord, form: str) -> str:
    """ "plain" or "speculative"."""
    return next(one.kind for one in record.engine.forms if one.name == form)


def points(records: Sequence[Labelled]) -> list[Point]:
    """One per prompt and speculative form whose engine tells the time split; sequential loads only."""
    found = []
    for one, cell, figures in _speculative_cells(records):
        if not cell.load.sequential or cell.fastest_plain is None:
            continue
        plain = _by_prompt(one.record, cell, cell.fastest_plain)
        for prompt, requests in _by_prompt(one.record, cell, figures.form).items():
            rounds = [request.rounds for request in requests if request.rounds is not None]
            ours, theirs = _decoding(requests), _decoding(plain.get(prompt, []))
            forwards = sum((part.draft_seconds or 0) + (part.verify_seconds or 0) for part in rounds)
            untold = any(part.draft_seconds is None or part.verify_seconds is None for part in rounds)
            if ours is None or theirs is None or untold or forwards <= 0:
                continue
            limit = sum(part.num_tokens for part in rounds) / forwards / theirs
            found.append(Point(limit, ours / theirs, cell.data_set if len(records) == 1 else one.label))
    return found


def worst(records: Sequence[Labelled], number: int = NUM_WORST) -> list[Bad]:
    """Prompts with another text first, then the slowest ones."""
    found: list[Bad] = []
    for one, cell, figures in _speculative_cells(records):
        name = next(form.reference for form in one.record.engine.forms if form.name == figures.form)
        reference = _by_prompt(one.record, cell, name or cell.fastest_plain or "")
        plain = _by_prompt(one.record, cell, cell.fastest_plain or "")
        label = " · ".join([*([one.label] if len(records) > 1 else []), cell.data_set, cell.load.label])
        for prompt, requests in _by_prompt(one.record, cell, figures.form).items():
            found += _bad(label, prompt, requests, plain.get(prompt, []), reference.get(prompt, []))
    found.sort(key=lambda bad: (bad.position is None, bad.speedup if bad.speedup is not None else float("inf")))
    return found[:number]


def _bad(
    label: str,
    prompt: tuple[str, int],
    requests: list[RequestPart],
    plain: list[RequestPart],
    reference: list[RequestPart],
) -> Iterator[Bad]:
    ours, theirs = _decoding(requests), _decoding(plain)
    rounds = [request.rounds for request in requests if request.rounds is not None]
    num_rounds = sum(part.num_rounds for part in rounds)
    pairs = [
        (request, other, first_difference(request, other)) for request, other in zip(requests, reference, strict=False)
    ]
    chosen = next((pair for pair in pairs if pair[2] is not None), pairs[0] if pairs else None)
    if chosen is None:
        return
    request, other, parting = chosen
    yield Bad(
        column=label,
        prompt_id=prompt[0],
        turn=prompt[1],
        speedup=ours / theirs if ours and theirs else None,
        acceptance_length=sum(part.num_tokens for part in rounds) / num_rounds if num_rounds else None,
        position=parting[1] if parting else None,
        unit=parting[0] if parting else "",
        plain=other.text,
        speculative=request.text,
    )


def _speculative_cells(records: Sequence[Labelled]) -> Iterator[tuple[Labelled, CellPart, FormFigures]]:
    for one in records:
        for cell in one.record.cells:
            for figures in cell.forms:
                if kind_of(one.record, figures.form) == "speculative":
                    yield one, cell, figures


def _by_prompt(record: RunRecord, cell: CellPart, form: str) -> dict[tuple[str, int], list[RequestPart]]:
    """(prompt, turn) -> its answers in the order of the repeats."""
    found: dict[tuple[str, int], list[RequestPart]] = {}
    batches: list[BatchPart] = [
        batch
        for batch in record.batches
        if batch.data_set == cell.data_set and batch.load == cell.load and batch.form == form
    ]
    for batch in sorted(batches, key=lambda one: one.repeat):
        for request in batch.requests:
            if request.failure is None:
                found.setdefault(request.key, []).append(request)
    return found


def _decoding(requests: Sequence[RequestPart]) -> float | None:
    """Median tokens per second after the first token."""
    speeds = [
        (request.num_tokens - 1) / request.decode_seconds
        for request in requests
        if request.num_tokens is not None and request.num_tokens > 1 and request.decode_seconds
    ]
    return statistics.median(speeds) if speeds else None
