"""Writes a report: one HTML page that needs nothing else, and the tables as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dflash import __version__
from dflash.bench.record import ModelPart, RunRecord
from dflash.bench.report.charts import Chart, draw_charts
from dflash.bench.report.difference import marked
from dflash.bench.report.series import Bad, Column, Labelled, columns, labelled, points, worst
from dflash.bench.report.tables import MISSING, Table, detail_table, markdown, number, summary_table
from dflash.prepare.jsonl import write_atomically

HTML_FILE = "report.html"
MARKDOWN_FILE = "report.md"
ALL_CHARTS = (
    "Speed-up",
    "Acceptance histogram",
    "Acceptance per slot",
    "Where the time goes",
    "Throughput over load",
    "Measured against the limit",
)


@dataclass(frozen=True)
class _Head:
    figure: str
    words: str


def write_report(records: Sequence[RunRecord], folder: Path) -> tuple[Path, Path]:
    """Write both files into `folder`, which exists or is made, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    page, text = folder / HTML_FILE, folder / MARKDOWN_FILE
    write_atomically(page, render_html(records).encode())
    write_atomically(text, render_markdown(records).encode())
    return page, text


def render_html(records: Sequence[RunRecord]) -> str:
    """The whole page."""
    named = labelled(records)
    forms = columns(named)
    charts = draw_charts(named, forms, points(named))
    environment = Environment(
        loader=PackageLoader("dflash.bench.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html.j2").render(
        subtitle=_subtitle(named),
        warnings=[_warning(one) for one in named if not one.record.finished],
        heads=_heads(forms),
        summary=_joined(named, summary_table),
        details=_joined(named, detail_table),
        charts=charts,
        left_out=_left_out(charts),
        worst=[_worst_row(bad) for bad in worst(named)],
        runs=[_run_row(one) for one in named],
        version=__version__,
    )


def render_markdown(records: Sequence[RunRecord]) -> str:
    """Both tables and the notes."""
    named = labelled(records)
    pieces = [markdown(_joined(named, table)) for table in (summary_table, detail_table)]
    pieces += ["\n".join(f"- {name}" for name in _facts(one)) + "\n" for one in named]
    return "\n".join(pieces)


def _joined(named: Sequence[Labelled], table: object) -> Table:
    assert callable(table)
    tables: list[Table] = [table(one.record) for one in named]
    if len(tables) == 1:
        return tables[0]
    headings = max((one.headings for one in tables), key=len)
    rows = []
    for label, one in zip((each.label for each in named), tables, strict=True):
        for index, row in enumerate(one.rows):
            by_name = dict(zip(one.headings, row, strict=True))
            rows.append((label if index == 0 else "", *(by_name.get(heading, "") for heading in headings)))
    return Table(tables[0].title, ("run", *headings), tuple(rows))


def _subtitle(named: Sequence[Labelled]) -> str:
    targets = {one.record.engine.target.name for one in named if one.record.engine.target is not None}
    days = sorted({one.record.provenance.started[:10] for one in named})
    settings = named[0].record.settings
    drawn = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    words = [", ".join(sorted(targets)), f"{len(named)} runs" if len(named) > 1 else "", ", ".join(days), drawn]
    return " · ".join(filter(None, words))


def _warning(one: Labelled) -> str:
    return f"{one.label}: this run is not complete. {one.record.stopped_by}"


def _heads(forms: Sequence[Column]) -> list[_Head]:
    """The few figures that a reader looks for first."""
    speedups = [(one.figures.speedup.repeats.median, one.label) for one in forms if one.figures.speedup is not None]
    lengths = [one.figures.acceptance_length for one in forms if one.figures.acceptance_length is not None]
    compared = sum(one.figures.identity.num_compared for one in forms if one.figures.identity is not None)
    same = sum(one.figures.identity.num_same for one in forms if one.figures.identity is not None)
    loops = [one.figures.looping_share for one in forms if one.figures.looping_share is not None]
    heads = []
    if len(speedups) == 1:
        heads.append(_Head(f"{speedups[0][0]:.2f}×", "speed-up"))
    elif speedups:
        low, high = min(speedups), max(speedups)
        heads += [_Head(f"{high[0]:.2f}×", f"best: {high[1]}"), _Head(f"{low[0]:.2f}×", f"worst: {low[1]}")]
    if lengths:
        heads.append(_Head(f"{statistics.fmean(lengths):.2f}", "tokens per forward of the target"))
    if compared:
        heads.append(_Head(f"{same} of {compared}", "outputs the same as plain decoding's"))
    if loops:
        heads.append(_Head(f"{statistics.fmean(loops):.0%}", "of the output runs in loops"))
    return heads


def _left_out(charts: Sequence[Chart]) -> list[str]:
    return [title for title in ALL_CHARTS if title not in {chart.title for chart in charts}]


def _worst_row(bad: Bad) -> dict[str, str | Markup]:
    turn = f", turn {bad.turn + 1}" if bad.turn else ""
    where = "same output" if bad.position is None else f"parts from plain at {bad.unit} {bad.position}"
    speed = MISSING if bad.speedup is None else f"{bad.speedup:.2f}×"
    length = number(bad.acceptance_length, "{:.2f}")
    return {
        "name": f"{bad.prompt_id}{turn}",
        "figures": f"{bad.column} · speed-up {speed} · acceptance length {length} · {where}",
        "text": marked(bad.plain, bad.speculative),
    }


def _run_row(one: Labelled) -> dict[str, object]:
    return {"label": one.label, "engine": one.record.engine.engine, "rows": _rows(one), "notes": one.record.notes}


def _facts(one: Labelled) -> list[str]:
    """For Markdown: what ran and what to keep in mind, in lines."""
    return [f"{one.label}: {name}: {value}" for name, value in _rows(one)] + [
        f"{one.label}: {note}" for note in one.record.notes
    ]


def _rows(one: Labelled) -> list[tuple[str, str]]:
    record = one.record
    engine, where, settings = record.engine, record.provenance, record.settings
    machine = where.machine
    rows: list[tuple[str, str | None]] = [
        ("command", where.command),
        ("started", f"{where.started}, {where.seconds:.0f} s"),
        ("target", _model(engine.target)),
        ("draft", _model(engine.draft)),
        ("block", None if engine.block_size is None else f"{engine.block_size} slots, anchor included"),
        ("numbers", engine.dtype),
        ("device", engine.device),
        ("threads", None if engine.num_threads is None else str(engine.num_threads)),
        ("machine", f"{machine.get('processor')}, {machine.get('usable_cpus')} CPUs, {machine.get('system')}"),
        ("revision", where.git_revision),
        ("versions", ", ".join(f"{name} {version}" for name, version in where.versions.items())),
        ("sampling", f"temperature {settings.temperature:g}, top-p {settings.top_p:g}, top-k {settings.top_k}, "
                     f"seed {settings.seed}, at most {settings.max_new_tokens} tokens, {settings.repeats} repeats"),
        ("thinking", None if settings.thinking is None else ("on" if settings.thinking else "off")),
        *((f"data set {one.name}", f"{one.num_prompts} of {one.num_available} prompts from {one.origin}, "
           f"licence {one.licence}, SHA-256 {one.sha256}") for one in record.data_sets),
        *((form.name, form.description) for form in engine.forms),
        *engine.details.items(),
    ]  # fmt: skip
    return [(name, value if value is not None else MISSING) for name, value in rows]


def _model(model: ModelPart | None) -> str | None:
    if model is None:
        return None
    revision = f", revision {model.revision}" if model.revision else ""
    return f"{model.name}{revision}, SHA-256 {model.sha256 or 'not known'}"
