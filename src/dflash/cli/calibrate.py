"""`dflash calibrate`: what forwards cost on this machine, measured, kept, and compared with real rounds."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.cli import report
from dflash.cli.demo import questions
from dflash.cli.errors import say
from dflash.cli.options import EngineOptions, output_option, with_options
from dflash.cli.progress import working
from dflash.cli.session import open_engine
from dflash.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from dflash.core.calibration import Curves, Times
    from dflash.core.cost import CostCurve
    from dflash.core.engine import Engine
    from dflash.types import Drafting, Round, Stats

MOST_TOKENS = 128
"""Of an answer that predictions are compared with."""
PAUSES = 4
"""Measurements within an answer, one of them before its first token; so many make a median."""
SLOW_SECONDS = 5.0
"""Where a single one takes longer, there is one per answer."""


@with_options
def calibrate(
    *,
    model: EngineOptions,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="X", min=0, help="Time for the sweeps over all widths.")
    ] = 10.0,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=0, help="Built-in prompts to compare the prediction with.")
    ] = 2,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the curves into an image (needs matplotlib).")
    ] = None,
    as_json: Annotated[bool, output_option("--json", help="Print one JSON record instead of tables.")] = False,
) -> None:
    """Measure verify and draft forwards by width and context depth, and keep the result for this machine.

    Loading measures the same in about a second; run this alone on a quiet machine for a better one. Between the
    measurements a few prompts are answered in three forms (plain, the draft's whole block every round, and by cost),
    and the tokens per second that the times predict for their rounds stand beside the measured ones.
    """
    if not math.isfinite(seconds):
        raise ConfigError(f"--seconds must be a number of seconds, not {seconds}.")
    if model.fixed:
        raise ConfigError("--fixed decides nothing by cost, so there is nothing to calibrate: drop it.")
    engine = open_engine(model)
    if engine.drafter is None:
        raise ConfigError("plain decoding needs no calibration; name a draft with --draft.")
    from dflash.core.calibration import costs_path, write_costs

    with working("measuring costs"):
        times, compared = _measured(engine, seconds, limit)
    verify, draft = times.curves()
    write_costs(costs_path(engine.info, engine.device(), engine.max_rows), verify, draft)
    if as_json:
        record = {
            "verify": verify.to_json(),
            "draft_seconds": None if draft is None else draft.at(1, 0),
            "compared": compared,
            "engine": report.engine_record(engine.info),
        }
        typer.echo(json.dumps(record))
    else:
        _print(verify, draft, compared)
    if plot is not None:  # last: a path that cannot be written costs no result
        _plot(plot, verify)


def _measured(engine: Engine, seconds: float, limit: int) -> tuple[Times, list[dict[str, Any]]]:
    """All times, and the tokens per second that they predict for answers beside the measured ones.

    An answer pauses every few tokens for a sweep, and its rounds are predicted from these alone, so that a machine
    whose pace drifts does so for both.
    """
    from dflash.core.calibration import measure
    from dflash.core.cost import CostTracker
    from dflash.core.memory import Memory
    from dflash.types import Drafting

    forms = {"plain": None, "fixed": Drafting(fixed=True), engine.drafting.mode: engine.drafting}
    answers = [(prompt, form) for prompt in (questions(None, limit) if limit else []) for form in forms]

    def swept() -> Times:
        return measure(
            engine.target,
            engine.drafter,
            engine.device(),
            exact=engine.info.exact,
            max_rows=engine.max_rows,
            seconds=seconds / (1 + len(answers) * PAUSES),
        )

    started = time.perf_counter()
    times = swept()
    pauses = PAUSES if time.perf_counter() - started < SLOW_SECONDS else 1
    engine.memory = Memory(CostTracker(*times.curves()))
    compared = []
    for prompt, form in answers:
        rounds, stats, beside = _answered(engine, prompt.opening(), forms[form], swept, pauses)
        times += beside
        if stats is not None:
            predicted = _predicted(rounds, stats, beside.curves(), forms[form])
            compared.append(
                {
                    "prompt": prompt.id,
                    "form": form,
                    "predicted_tokens_per_second": predicted,
                    "measured_tokens_per_second": stats.decode_tokens_per_second,
                }
            )
    return times, compared


def _answered(
    engine: Engine, prompt: Any, drafting: Drafting | None, swept: Callable[[], Times], pauses: int
) -> tuple[list[Round], Stats | None, Times]:
    """The rounds of an answer; its figures, None where it had no round behind the prefill; and the times of forwards
    between its rounds, where its own clock stands still."""
    from dflash.types import SamplingParams

    rounds, stats, times, num_swept = [], None, swept(), 1
    params = SamplingParams(max_new_tokens=MOST_TOKENS)
    for event in engine.stream(prompt, params, use_draft=drafting is not None, drafting=drafting):
        rounds.append(event.round)
        stats = event.stats
        if num_swept < pauses and stats.num_tokens >= num_swept * MOST_TOKENS // pauses:
            times, num_swept = times + swept(), num_swept + 1
    for _ in range(num_swept, pauses):  # a short answer
        times += swept()
    return rounds[1:], stats if len(rounds) > 1 else None, times


def _predicted(rounds: list[Round], stats: Stats, curves: Curves, drafting: Drafting | None) -> float:
    """Tokens per second by the curves."""
    from dflash.core.cost import predicted_seconds

    every_round = drafting is not None and drafting.fixed
    seconds = predicted_seconds(rounds, stats.num_prompt_tokens, *curves, always_drafts=every_round)
    return sum(stats.acceptance_lengths) / seconds


def _print(verify: CostCurve, draft: CostCurve | None, compared: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="milliseconds of a verify forward", title_justify="left")
    table.add_column("rows", justify="right")
    for depth in verify.depths:
        table.add_column(f"behind {depth} tokens", justify="right")
    for number, rows in enumerate(verify.rows):
        table.add_row(str(rows), *(f"{1e3 * line[number]:.2f}" for line in verify.seconds))
    console.print(table)
    if draft is not None:
        console.print(f"a draft takes {1e3 * draft.at(1, 0):.2f} ms")
    if compared:
        console.print(_comparison(compared))


def _comparison(compared: list[dict[str, Any]]) -> Table:
    """A row per prompt and form; the last one is the prediction that was furthest off."""
    from rich.table import Table

    table = Table(title="tokens per second", title_justify="left")
    for heading in ("prompt", "form", "predicted", "measured", "error"):
        table.add_column(heading, justify="left" if heading in ("prompt", "form") else "right")
    errors = []
    for one in compared:
        predicted, measured = one["predicted_tokens_per_second"], one["measured_tokens_per_second"]
        errors.append(predicted / measured - 1)
        table.add_row(one["prompt"], one["form"], f"{predicted:.1f}", f"{measured:.1f}", f"{errors[-1]:+.0%}")
    table.add_section()
    table.add_row("furthest off", "", "", "", f"{max(errors, key=abs):+.0%}")
    return table


def _plot(path: Path, verify: CostCurve) -> None:
    """Seconds by rows, a line per depth. Raises MissingExtra without matplotlib, ConfigError for a bad path."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("--plot needs matplotlib: run `pip install matplotlib`.") from None
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for depth, line in zip(verify.depths, verify.seconds, strict=True):
        axes.plot(verify.rows, [1e3 * value for value in line], marker="o", label=f"behind {depth} tokens")
    axes.set(xlabel="rows of the forward", ylabel="milliseconds", ylim=(0, None))
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot cannot write {path} ({error}); give a writable .png, .pdf or .svg file.") from None
    say(f"drawn into {path}")
