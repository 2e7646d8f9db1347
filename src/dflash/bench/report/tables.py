"""The figures of a record as tables of words, for the terminal, Markdown and HTML alike. A missing figure is a dash."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.bench.record import CellPart, FormFigures, IdentityPart, RoundsPart, RunRecord, Span, SpeedupPart

MISSING = "–"


@dataclass(frozen=True)
class Table:
    """Rows of words under headings. Columns up to "form" name what the others are figures of; of those before "form",
    a cell that repeats the one above it is empty."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def num_named(self) -> int:
        """Columns before "form"."""
        return self.headings.index("form")

    def grouped(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """(name of a group, its rows without the columns that name it)."""
        groups: list[tuple[str, list[tuple[str, ...]]]] = []
        names = [""] * self.num_named
        for row in self.rows:
            named = row[: self.num_named]
            if any(named):
                names = [cell or before for cell, before in zip(named, names, strict=True)]
                groups.append((" · ".join(filter(None, names)), []))
            groups[-1][1].append(row[self.num_named :])
        return groups


def summary_table(record: RunRecord) -> Table:
    """One row per data set, load and form."""
    several_loads = _several_loads(record)
    headings = (
        "data set",
        *(("load",) if several_loads else ()),
        "form",
        "speed-up",
        "tokens/s",
        "acceptance length",
        "first token",
        "per token",
        "same output",
        "failed",
    )
    rows = []
    for cell in record.cells:
        for index, figures in enumerate(cell.forms):
            rows.append(
                (
                    cell.data_set if index == 0 else "",
                    *((cell.load.label if index == 0 else "",) if several_loads else ()),
                    form_name(cell, figures),
                    speedup(figures.speedup),
                    span(speed(cell, figures), "{:.1f}"),
                    number(figures.acceptance_length, "{:.2f}"),
                    milliseconds(middle(figures.first_token_seconds)),
                    milliseconds(middle(figures.seconds_per_token)),
                    same(figures.identity),
                    failed(figures),
                )
            )
    for load in record.settings.loads:
        rows += _mean_rows([cell for cell in record.cells if cell.load == load], several_loads)
    return Table("Summary", headings, tuple(rows))


def _mean_rows(cells: Sequence[CellPart], several_loads: bool) -> list[tuple[str, ...]]:
    """Means over several data sets, each set counted once, as papers give them; outputs and failures added up."""
    if len(cells) < 2:
        return []
    rows: list[tuple[str, ...]] = []
    for name in (figures.form for figures in cells[0].forms if figures.acceptance_length or figures.speedup):
        figures = [one for cell in cells for one in cell.forms if one.form == name]
        ratios = [one.speedup.repeats.median for one in figures if one.speedup is not None]
        lengths = [one.acceptance_length for one in figures if one.acceptance_length is not None]
        compared = [one.identity for one in figures if one.identity is not None]
        num_failed = sum(sum(one.failures.values()) for one in figures)
        first = not rows
        rows.append(
            (
                f"mean of {len(cells)} sets" if first else "",
                *((cells[0].load.label if first else "",) if several_loads else ()),
                name,
                f"{statistics.fmean(ratios):.2f}×" if len(ratios) == len(cells) else MISSING,
                MISSING,
                number(statistics.fmean(lengths) if len(lengths) == len(cells) else None, "{:.2f}"),
                MISSING,
                MISSING,
                f"{sum(one.num_same for one in compared)} of {sum(one.num_compared for one in compared)}"
                if compared
                else MISSING,
                str(num_failed),
            )
        )
    return rows


def detail_table(record: RunRecord) -> Table:
    """Rounds, shares and memory: what stands behind the summary."""
    several_loads = _several_loads(record)
    rows = [
        (
            cell.data_set if index == 0 else "",
            *((cell.load.label if index == 0 else "",) if several_loads else ()),
            figures.form,
            f"{figures.num_done} of {figures.num_requests}",
            count(figures.num_tokens),
            count(figures.rounds.num_rounds if figures.rounds else None),
            sources(figures.rounds),
            milliseconds(greatest(figures.first_token_seconds)),
            milliseconds(greatest(figures.seconds_per_token)),
            share(figures.looping_share),
            share(figures.copied_share),
            share(figures.repeated_share),
            MISSING if figures.num_unsteady is None else str(figures.num_unsteady),
            MISSING if figures.peak_memory_bytes is None else f"{figures.peak_memory_bytes / 1e6:.0f} MB",
        )
        for cell in record.cells
        for index, figures in enumerate(cell.forms)
    ]
    headings = (
        "data set",
        *(("load",) if several_loads else ()),
        "form",
        "answered",
        "tokens",
        "rounds",
        "accepted from copies",
        "first token, p95",
        "per token, p95",
        "looping",
        "copied",
        "repeated",
        "unsteady",
        "peak memory",
    )
    return Table("Details", headings, tuple(rows))


def _several_loads(record: RunRecord) -> bool:
    return len(record.settings.loads) > 1 or not record.settings.loads[0].sequential


def form_name(cell: CellPart, figures: FormFigures) -> str:
    """The form's name, marked if it is what the others are divided by."""
    several = sum(1 for one in cell.forms if one.speedup is None) > 1
    return f"{figures.form}, fastest" if figures.form == cell.fastest_plain and several else figures.form


def speed(cell: CellPart, figures: FormFigures) -> Span | None:
    """Decoding speed where requests follow one another and it is told, else that of whole answers or of the load."""
    if cell.load.sequential and figures.decode_tokens_per_second is not None:
        return figures.decode_tokens_per_second
    return figures.tokens_per_second


def span(value: Span | None, form: str) -> str:
    """'15.2 (14.9–15.6)', without the bracket for a single value."""
    if value is None:
        return MISSING
    middle = form.format(value.median)
    if len(value.values) < 2:
        return middle
    return f"{middle} ({form.format(value.low)}–{form.format(value.high)})"


def speedup(value: SpeedupPart | None) -> str:
    """'1.52× (1.50–1.54)'."""
    if value is None:
        return MISSING
    ratio = value.repeats
    bracket = f" ({ratio.low:.2f}–{ratio.high:.2f})" if len(ratio.values) > 1 else ""
    return f"{ratio.median:.2f}×{bracket}"


def number(value: float | None, form: str) -> str:
    """The figure, or a dash."""
    return MISSING if value is None else form.format(value)


def count(value: int | None) -> str:
    """A whole number with thin groups, or a dash."""
    return MISSING if value is None else f"{value:,}".replace(",", " ")


def sources(rounds: RoundsPart | None) -> str:
    """Share of the accepted draft tokens that a copy of earlier text guessed, alone or as the draft did, too."""
    told = rounds.accepted_by_source if rounds is not None else None
    if not told:
        return MISSING
    return share((told.get("copy", 0) + told.get("both", 0)) / sum(told.values()))


def share(value: float | None) -> str:
    """Per cent."""
    return MISSING if value is None else f"{value:.0%}"


def milliseconds(seconds: float | None) -> str:
    """'20.3 ms'."""
    return MISSING if seconds is None else f"{1e3 * seconds:.{1 if seconds < 0.1 else 0}f} ms"


def middle(value: Span | None) -> float | None:
    """The median."""
    return None if value is None else value.median


def greatest(value: Span | None) -> float | None:
    """The upper end: of times over requests, the 95th percentile."""
    return None if value is None else value.high


def same(value: IdentityPart | None) -> str:
    """'12 of 12'."""
    return MISSING if value is None or not value.num_compared else f"{value.num_same} of {value.num_compared}"


def failed(figures: FormFigures) -> str:
    """'0', or '1 timeout, 2 server error'."""
    return ", ".join(f"{number} {kind}" for kind, number in sorted(figures.failures.items())) or "0"


def markdown(table: Table, *, heading: str = "") -> str:
    """A Markdown table; figures are aligned to the right."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "|".join("---" if index <= table.num_named else "---:" for index in range(len(table.headings))) + "|"
    lines = [line(table.headings), rule, *(line(row) for row in table.rows)]
    return (f"{heading}\n\n" if heading else "") + "\n".join(lines) + "\n"
