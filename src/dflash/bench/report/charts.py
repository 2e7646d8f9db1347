"""The charts of a report, drawn by matplotlib as SVG inside the page: no file, font or script from elsewhere.

Each chart is small with large letters, so that it can be read on a phone at full width and beside others on a screen.
A chart for which no record has figures is left out, and the page says so.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dflash.bench.record import Span
from dflash.bench.report.series import Column, Labelled, Point

SPECULATIVE, PLAIN, LIMIT = "#2563eb", "#94a3b8", "#b45309"
SERIES = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
PARTS = (("draft", "#2563eb"), ("verify", "#94a3b8"), ("other", "#d97706"))
MAX_SERIES = len(SERIES)
STYLE: Any = {  # matplotlib types the key of every setting
    "svg.fonttype": "none",
    "svg.hashsalt": "dflash",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#64748b",
    "axes.labelcolor": "#334155",
    "xtick.color": "#334155",
    "ytick.color": "#334155",
    "grid.color": "#e2e8f0",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
WIDTH, HEIGHT = 4.6, 3.0
"""Inches; 4.6 inches over a phone's 360 pixels keep letters of 10 points readable."""


@dataclass(frozen=True)
class Chart:
    """One figure of the page."""

    title: str
    caption: str
    svg: str


def draw_charts(records: Sequence[Labelled], columns: Sequence[Column], points: Sequence[Point]) -> list[Chart]:
    """Every chart that the records have figures for."""
    with mpl.rc_context(STYLE):
        drawn = [
            _speedups(columns),
            _histogram(columns),
            _slots(columns),
            _time_split(columns),
            _throughput(records),
            _limits(points),
        ]
    return [chart for chart in drawn if chart is not None]


def _speedups(columns: Sequence[Column]) -> Chart | None:
    shown = [(one, speedup) for one in columns if (speedup := one.figures.speedup) is not None]
    if not shown:
        return None
    figure, axes = _figure(height=1.1 + 0.42 * len(shown))
    for row, (_, speedup) in enumerate(shown):
        ratio = speedup.repeats.median
        low, high = speedup.interval or (speedup.repeats.low, speedup.repeats.high)
        axes.barh(row, ratio, color=SPECULATIVE, height=0.6, alpha=0.9)
        axes.plot([low, high], [row, row], color="#0f172a", linewidth=1.2, marker="|", markersize=7)
        right = max(high, ratio, speedup.limit or 0)
        axes.annotate(f"{ratio:.2f}×", (right, row), xytext=(8, 0), textcoords="offset points", va="center")
        if speedup.limit is not None:
            axes.plot(speedup.limit, row, marker="D", markersize=5, color=LIMIT, linestyle="none")
    axes.axvline(1.0, color="#64748b", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(shown)), [_short(one.label) for one, _ in shown])
    axes.invert_yaxis()
    reach = [max(one.repeats.high, *(one.interval or (0.0,)), one.limit or 0.0, 1.0) for _, one in shown]
    axes.set_xlim(0, 1.2 * max(reach))
    axes.set_xlabel("speed-up over the fastest plain form")
    axes.grid(axis="x")
    caption = (
        "Median over the repeats. Lines: 95 % over the choice of prompts, or least to greatest repeat with fewer than "
        "three prompts. Diamonds: the limit that the measured forwards allow. Dashed: plain decoding."
    )
    return Chart("Speed-up", caption, _svg(figure, "speedup"))


def _histogram(columns: Sequence[Column]) -> Chart | None:
    shown = [(one, one.figures.rounds.lengths) for one in columns if one.figures.rounds and one.figures.rounds.lengths]
    shown = shown[:MAX_SERIES]
    if not shown:
        return None
    figure, axes = _figure()
    longest = max(max(lengths or {1: 0}) for _, lengths in shown)
    thickness = 0.8 / len(shown)
    for index, (one, lengths) in enumerate(shown):
        assert lengths is not None
        total = sum(lengths.values())
        places = [length + (index - (len(shown) - 1) / 2) * thickness for length in range(1, longest + 1)]
        shares = [lengths.get(length, 0) / total for length in range(1, longest + 1)]
        axes.bar(places, shares, width=thickness, color=SERIES[index], label=_short(one.label))
    axes.set_xlabel("tokens per round, the target's own included")
    axes.set_ylabel("share of rounds")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xticks(range(1, longest + 1))
    axes.grid(axis="y")
    _legend(axes, len(shown))
    return Chart("Acceptance histogram", "How many tokens a forward of the target gave.", _svg(figure, "histogram"))


def _slots(columns: Sequence[Column]) -> Chart | None:
    shown = [
        (one, rounds)
        for one in columns
        if (rounds := one.figures.rounds) is not None and rounds.accepted_per_slot and rounds.num_rounds
    ][:MAX_SERIES]
    if not shown:
        return None
    figure, axes = _figure()
    for index, (one, rounds) in enumerate(shown):
        assert rounds.accepted_per_slot is not None
        proposed = rounds.proposed_per_slot or [rounds.num_rounds] * len(rounds.accepted_per_slot)
        rates = [accepted / asked for accepted, asked in zip(rounds.accepted_per_slot, proposed, strict=True) if asked]
        axes.plot(range(1, len(rates) + 1), rates, marker="o", color=SERIES[index], label=_short(one.label))
    axes.set_xlabel("slot of the block")
    axes.set_ylabel("accepted when proposed")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid()
    _legend(axes, len(shown))
    caption = "A slot is accepted only if all slots before it are."
    return Chart("Acceptance per slot", caption, _svg(figure, "slots"))


def _time_split(columns: Sequence[Column]) -> Chart | None:
    shown = []
    for one in columns:
        rounds = one.figures.rounds
        if rounds is None or not rounds.num_rounds:
            continue
        parts = (rounds.draft_seconds, rounds.verify_seconds, rounds.other_seconds)
        if None not in parts:
            shown.append((one, [1e3 * (part or 0.0) / rounds.num_rounds for part in parts]))
    if not shown:
        return None
    figure, axes = _figure(height=1.4 + 0.42 * len(shown))
    for row, (_, parts_ms) in enumerate(shown):
        left = 0.0
        for (name, colour), width in zip(PARTS, parts_ms, strict=True):
            axes.barh(row, width, left=left, color=colour, height=0.6, label=name if row == 0 else None)
            if width > 0.12 * sum(parts_ms):
                axes.text(left + width / 2, row, f"{width:.1f}", ha="center", va="center", color="white", fontsize=9)
            left += width
    axes.set_yticks(range(len(shown)), [_short(one.label) for one, _ in shown])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per round")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3)
    return Chart("Where the time goes", "Means over all rounds.", _svg(figure, "split"))


def _throughput(records: Sequence[Labelled]) -> Chart | None:
    lines: dict[str, list[tuple[float, Span]]] = {}
    rates = False
    for one in records:
        for cell in one.record.cells:
            for figures in cell.forms:
                if figures.tokens_per_second is None:
                    continue
                prefix = [*([one.label] if len(records) > 1 else []), cell.data_set]
                place = cell.load.rate if cell.load.rate is not None else float(cell.load.concurrency or 1)
                rates = rates or cell.load.rate is not None
                lines.setdefault(" · ".join([*prefix, figures.form]), []).append((place, figures.tokens_per_second))
    lines = {name: line for name, line in lines.items() if len(line) > 1}
    if not lines:
        return None
    figure, axes = _figure()
    for index, (name, line) in enumerate(list(lines.items())[:MAX_SERIES]):
        line = sorted(line, key=lambda one: one[0])
        middle = [speed.median for _, speed in line]
        spread = [[s.median - s.low for _, s in line], [s.high - s.median for _, s in line]]
        axes.errorbar(
            [place for place, _ in line], middle, yerr=spread, marker="o", capsize=3, color=SERIES[index],
            label=_short(name),
        )  # fmt: skip
    axes.set_xlabel("requests per second" if rates else "requests at once")
    axes.set_ylabel("tokens/s of all requests")
    axes.set_xscale("log", base=2)
    places = sorted({place for line in lines.values() for place, _ in line})
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.set_ylim(bottom=0)
    axes.grid()
    _legend(axes, len(lines))
    caption = "Bars: least to greatest repeat. At one request at a time, tokens over the time of whole answers."
    return Chart("Throughput over load", caption, _svg(figure, "throughput"))


def _limits(points: Sequence[Point]) -> Chart | None:
    if not points:
        return None
    figure, axes = _figure()
    labels = list(dict.fromkeys(point.label for point in points))[:MAX_SERIES]
    for index, label in enumerate(labels):
        mine = [point for point in points if point.label == label]
        axes.scatter(
            [point.limit for point in mine], [point.measured for point in mine], s=26, alpha=0.75,
            color=SERIES[index], label=_short(label), edgecolors="none",
        )  # fmt: skip
    reach = 1.08 * max(max(point.limit, point.measured) for point in points)
    axes.plot([0, reach], [0, reach], color="#64748b", linewidth=1, linestyle="--")
    axes.set_xlim(0, reach)
    axes.set_ylim(0, reach)
    axes.set_xlabel("limit: τ · t₁ / (t draft + t verify)")
    axes.set_ylabel("measured speed-up")
    axes.grid()
    _legend(axes, len(labels))
    caption = (
        "One point per prompt. On the dashed line a round costs its two forwards and nothing else; "
        "the distance below it is the loop's own cost and the machine's noise."
    )
    return Chart("Measured against the limit", caption, _svg(figure, "limit"))


def _figure(height: float = HEIGHT) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _legend(axes: Any, number: int) -> None:
    if number > 1:
        axes.legend()


def _short(label: str, most: int = 26) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"


def _svg(figure: Figure, name: str) -> str:
    """The <svg> element alone, scaled by the page; its ids are made unique by `name`."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    svg = text[text.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{name}-\2"', svg)
    return svg.replace("<svg", f'<svg role="img" class="chart" data-chart="{name}"', 1)
