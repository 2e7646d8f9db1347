"""`dflash demo`: a few prompts side by side, plain decoding and DFlash, and whether the tokens are the same."""

from __future__ import annotations

import functools
import importlib.resources
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.cli import report
from dflash.cli.comparison import Comparison, compare, num_runs, plain_speed, speed, warm_up
from dflash.cli.options import EngineOptions, output_option, with_options
from dflash.cli.progress import counting
from dflash.cli.session import open_engine
from dflash.prepare.prompts import Conversation, read_prompts
from dflash.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from dflash.core.engine import Engine

SHOWN_CHARACTERS = 400
"""Length at which the answers of the side-by-side view are cut."""


@with_options
def demo(
    *,
    model: EngineOptions,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", metavar="N", help="Most tokens per answer.")
    ] = 128,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", min=1, help="Timed runs of each kind per prompt.")
    ] = 2,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help='JSONL with a "prompt" per line (default: four built-in ones).'),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="Use only the first prompts.")] = None,
    as_json: Annotated[bool, output_option("--json", help="Print one JSON record instead of tables.")] = False,
) -> None:
    """Compare plain decoding with DFlash on a few prompts.

    Greedy, one prompt at a time, runs of both kinds alternating. Plain decoding runs in its fastest form for the
    speed and once in its bit-exact form for the comparison of tokens; the speed-up is over the faster of the two.
    """
    from rich.console import Console

    asked = questions(prompts, limit)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    engine = open_engine(model)
    console = Console(quiet=as_json)
    console.print(report.engine_line(engine.info), highlight=False, markup=False, soft_wrap=True)
    comparisons = _run(engine, asked, params, repeats, console)
    if as_json:
        typer.echo(json.dumps(demo_record(engine, params, comparisons)))
    else:
        _print_summary(console, comparisons)


def questions(path: Path | None = None, limit: int | None = None) -> list[Conversation]:
    """Prompts of a JSONL file, or the built-in ones. Raises errors of `prepare/prompts.py`, which name the line."""
    if path is not None:
        return read_prompts(path, limit=limit)
    built_in = importlib.resources.files("dflash").joinpath("data", "prompts", "demo.jsonl")
    with importlib.resources.as_file(built_in) as file:
        return read_prompts(file, limit=limit)


def _run(
    engine: Engine, prompts: list[Conversation], params: SamplingParams, repeats: int, console: Console
) -> list[Comparison]:
    """Compare prompt by prompt, showing each result as it comes, above a progress bar on a terminal."""
    shown = console if console.is_terminal and not console.quiet else None
    comparisons = []
    with counting("warming up", num_runs(len(prompts), repeats), console=shown) as tick:
        warm_up(engine, prompts[0])
        for prompt in prompts:
            done = functools.partial(tick, prompt.id, 1)
            tick(prompt.id, 0)
            comparisons.append(compare(engine, prompt, params, repeats, done))
            _print_side_by_side(console, comparisons[-1])
    return comparisons


def _print_side_by_side(console: Console, one: Comparison) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{one.prompt.id}: {one.prompt.turns[0]}"), title_justify="left", expand=True)
    table.add_column(f"plain · {report.tokens_per_second(plain_speed([one]))}", ratio=1)
    table.add_column(f"DFlash · {report.tokens_per_second(speed(one.dflash))} · {report.times(one.speedup)}", ratio=1)
    table.add_row(Text(_shortened(one.plain[0].text)), Text(_shortened(one.dflash[0].text)))
    console.print(table)
    console.print(f"same tokens: {_same(one)}\n", markup=False, highlight=False, soft_wrap=True)


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."


def _same(one: Comparison) -> str:
    if one.difference is None:
        return "yes"
    where = one.difference
    return (
        f"no, from token {where.position} on: plain {where.plain!r}, DFlash {where.dflash!r}; "
        f"the target's two best tokens are {where.margin:.3g} apart there"
    )


def _print_summary(console: Console, comparisons: list[Comparison]) -> None:
    from rich.table import Table

    table = Table(title="greedy, one prompt at a time", title_justify="left")
    table.add_column("prompt")
    for heading in ("plain", "DFlash", "speed-up", "acceptance length", "same tokens"):
        table.add_column(heading, justify="right")
    for one in comparisons:
        table.add_row(one.prompt.id, *_figures([one]))
    table.add_section()
    table.add_row("all", *_figures(comparisons))
    console.print(table)
    console.print(report.histogram_table(_lengths(comparisons)))


def _figures(comparisons: list[Comparison]) -> list[str]:
    plain, dflash = _speeds(comparisons)
    lengths = _lengths(comparisons)
    same = sum(one.difference is None for one in comparisons)
    verdict = f"{same} of {len(comparisons)}" if len(comparisons) > 1 else ("yes" if same else "no")
    return [
        report.tokens_per_second(plain),
        report.tokens_per_second(dflash),
        report.times(dflash / plain),
        f"{sum(lengths) / len(lengths):.2f}" if lengths else "-",
        verdict,
    ]


def _speeds(comparisons: list[Comparison]) -> tuple[float, float]:
    """Tokens per second of (the faster plain form, DFlash) over all prompts and repeats."""
    return (
        plain_speed(comparisons),
        speed(result for one in comparisons for result in one.dflash),
    )


def _lengths(comparisons: list[Comparison]) -> list[int]:
    """Tokens per round of DFlash's first runs (repeats only repeat them)."""
    return [length for one in comparisons for length in one.dflash[0].stats.acceptance_lengths]


def demo_record(engine: Engine, params: SamplingParams, comparisons: list[Comparison]) -> dict[str, Any]:
    """Everything the tables show, as JSON values."""
    fastest, dflash = _speeds(comparisons)
    plain = speed(result for one in comparisons for result in one.plain)
    padded = speed(one.padded for one in comparisons)
    lengths = _lengths(comparisons)
    return {
        "engine": report.engine_record(engine.info),
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "repeats": len(comparisons[0].plain),
        "plain_tokens_per_second": report.number(plain),
        "plain_padded_tokens_per_second": report.number(padded),
        "dflash_tokens_per_second": report.number(dflash),
        "speedup": report.number(dflash / fastest),
        "acceptance_length": report.number(sum(lengths) / len(lengths)) if lengths else None,
        "acceptance_histogram": report.histogram(lengths),
        "same_tokens": all(one.difference is None for one in comparisons),
        "prompts": [_comparison_record(one) for one in comparisons],
    }


def _comparison_record(one: Comparison) -> dict[str, Any]:
    where = one.difference
    return {
        "id": one.prompt.id,
        "prompt": one.prompt.turns[0],
        "speedup": report.number(one.speedup),
        "same_tokens": where is None,
        "first_difference": None
        if where is None
        else {"position": where.position, "plain": where.plain, "dflash": where.dflash, "margin": where.margin},
        "plain": [report.stats_record(result.stats) for result in one.plain],
        "plain_padded": report.stats_record(one.padded.stats),
        "dflash": [report.stats_record(result.stats) for result in one.dflash],
        "text": one.dflash[0].text,
        "token_ids": one.dflash[0].token_ids,
    }
