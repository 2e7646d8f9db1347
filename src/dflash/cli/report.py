"""Figures of a generation in words, tables and JSON. All times arrive in seconds and are shown in milliseconds."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dflash.types import Round, Stats

if TYPE_CHECKING:
    from rich.table import Table

    from dflash.core.engine_info import EngineInfo


def number(value: float) -> float | None:
    """For JSON, which knows no NaN: None where there is no figure (no round yet)."""
    return None if math.isnan(value) else round(value, 6)


def tokens_per_second(value: float) -> str:
    """'31.4 tok/s', or '-' before the first round."""
    return "-" if math.isnan(value) else f"{value:.1f} tok/s"


def times(value: float) -> str:
    """'2.31x', or '-' where one side made a single token only."""
    return "-" if math.isnan(value) else f"{value:.2f}x"


def engine_record(info: EngineInfo) -> dict[str, Any]:
    """What ran, as JSON values."""
    return dataclasses.asdict(info) | {"exact": info.exact}


def engine_line(info: EngineInfo) -> str:
    """What runs, in one line: models, numbers, machine, and whether a draft can change the bits."""
    draft = "no draft" if info.draft is None else f"draft {info.draft} (block {info.block_size})"
    threads = "" if info.num_threads is None else f", {info.num_threads} thread{'s' if info.num_threads != 1 else ''}"
    if info.exactness is None:
        exact = "not bit-exact (not asked for)"
    elif info.exact:
        width = info.exactness.width
        exact = f"bit-exact (forwards of {width} rows or more)" if width > 1 else "bit-exact (forwards of any width)"
    else:
        exact = f"not bit-exact here: {info.exactness.reason}"
    return " · ".join([f"target {info.target}", draft, info.dtype, f"{info.device}{threads}", exact])


def stats_record(stats: Stats) -> dict[str, Any]:
    """One generation's figures as JSON values."""
    return {
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_tokens": stats.num_tokens,
        "num_rounds": stats.num_rounds,
        "acceptance_length": number(stats.acceptance_length),
        "acceptance_lengths": list(stats.acceptance_lengths),
        "num_proposed": stats.num_proposed,
        "num_accepted": stats.num_accepted,
        "proposed_per_slot": list(stats.proposed_per_slot),
        "accepted_per_slot": list(stats.accepted_per_slot),
        "prefill_seconds": number(stats.prefill_seconds),
        "decode_seconds": number(stats.decode_seconds),
        "draft_seconds": number(stats.draft_seconds),
        "verify_seconds": number(stats.verify_seconds),
        "overhead_seconds": number(stats.overhead_seconds),
        "decode_tokens_per_second": number(stats.decode_tokens_per_second),
        "rounds_by_choice": dict(stats.reasons),
        "rounds_by_rows": {str(rows): count for rows, count in sorted(stats.rows.items())},
        "accepted_by_source": dict(stats.accepted_by_source),
        "notes": list(stats.notes),
        "finish_reason": stats.finish_reason,
        "drafting_stopped": stats.drafting_stopped,
    }


def stats_line(stats: Stats) -> str:
    """One generation's figures in one line."""
    parts = [f"{stats.num_tokens} tokens"]
    if stats.num_rounds:
        parts.append(tokens_per_second(stats.decode_tokens_per_second))
    if stats.num_proposed:
        parts.append(f"acceptance length {stats.acceptance_length:.2f}")
    if stats.accepted_by_source:
        parts.append(
            "accepted: " + ", ".join(f"{count} {source}" for source, count in stats.accepted_by_source.items())
        )
    parts += stats.notes
    parts += [f"prefill {1e3 * stats.prefill_seconds:.0f} ms", f"ended by {stats.finish_reason}"]
    return " · ".join(parts)


def round_record(step: Round) -> dict[str, Any]:
    """One round as JSON values; `other` is all that is neither draft nor target."""
    return {
        "tokens": list(step.tokens),
        "num_proposed": step.num_proposed,
        "num_accepted": step.num_accepted,
        "choice": step.reason,
        "draft_seconds": number(step.draft_seconds),
        "verify_seconds": number(step.verify_seconds),
        "other_seconds": number(step.total_seconds - step.draft_seconds - step.verify_seconds),
    }


def profile_table(rounds: Sequence[Round], stats: Stats) -> Table:
    """Where each round's time went (first row: the prefill), and each part's share of the decode time."""
    from rich.table import Table

    table = Table(title="milliseconds per round", title_justify="left")
    for heading in ("round", "proposed", "accepted", "draft", "verify", "other", "total"):
        table.add_column(heading, justify="right")
    for index, step in enumerate(rounds):
        other = step.total_seconds - step.draft_seconds - step.verify_seconds
        table.add_row(
            str(index) if index else "prefill",
            str(step.num_proposed),
            str(step.num_accepted),
            *(f"{1e3 * part:.2f}" for part in (step.draft_seconds, step.verify_seconds, other, step.total_seconds)),
        )
    if stats.decode_seconds:
        parts = (stats.draft_seconds, stats.verify_seconds, stats.overhead_seconds, stats.decode_seconds)
        table.add_section()
        table.add_row(
            "all",
            str(stats.num_proposed),
            str(stats.num_accepted),
            *(f"{1e3 * part:.0f}" for part in parts),
        )
        table.add_row("share", "", "", *(f"{part / stats.decode_seconds:.1%}" for part in parts))
    return table


def histogram(lengths: Iterable[int]) -> list[tuple[int, int]]:
    """(tokens per round, number of rounds), every length from 1 to the longest seen."""
    counts = Counter(lengths)
    return [(length, counts[length]) for length in range(1, max(counts, default=0) + 1)]


def histogram_table(lengths: Sequence[int], width: int = 40) -> Table:
    """The histogram as bars of at most `width` characters."""
    from rich.table import Table

    table = Table(title="rounds by tokens they gave (bonus included)", title_justify="left", box=None, padding=(0, 1))
    table.add_column("tokens", justify="right")
    table.add_column("rounds", justify="right")
    table.add_column("")
    rows = histogram(lengths)
    most = max((count for _, count in rows), default=1)
    for length, count in rows:
        table.add_row(str(length), str(count), "█" * round(width * count / most))
    return table
