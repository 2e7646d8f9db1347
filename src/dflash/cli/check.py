"""`dflash check`: is this draft read as it was meant? Exit code 1 if something that was judged speaks against the pair,
0 if nothing does, 2 for bad input."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.cli import report
from dflash.cli.demo import questions
from dflash.cli.options import DraftArgument, MachineOptions, TargetArgument, output_option, with_options
from dflash.cli.progress import progress_bar
from dflash.resolve import AUTO

if TYPE_CHECKING:
    from rich.console import Console

    from dflash.check.probe import Figures
    from dflash.check.run import CheckReport

EXIT_UNUSABLE = 1
BUILT_IN_PROMPTS = 3
"""Of the demo's prompts: enough places to judge, and short."""


@with_options
def check(
    target: TargetArgument,
    draft: DraftArgument = AUTO,
    *,
    machine: MachineOptions,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", metavar="N", min=1, help="Most tokens per answer of the probe.")
    ] = 32,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE", help='JSONL with a "prompt" per line (default: three built-in ones).'
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="Use only the first prompts.")] = None,
    as_json: Annotated[bool, output_option("--json", help="Print one JSON record instead of tables.")] = False,
) -> None:
    """Show how a draft is read, and find out on a few prompts whether that is right.

    Compares the draft as it is configured with the other reading of its anchor and with taps one layer off. Ends with
    exit code 1 if something speaks against the pair. With too few places to judge, the verdict says so.
    """
    asked = questions(prompts, limit if prompts is not None or limit is not None else BUILT_IN_PROMPTS)
    with progress_bar("starting") as progress:
        from dflash.check.run import check as run

        found = run(
            target,
            draft,
            backend=machine.backend,
            prompts=asked,
            max_new_tokens=max_new_tokens,
            progress=progress,
            dtype=machine.dtype,
            device=machine.device,
            num_threads=machine.threads,
            trust_remote_code=machine.trust_remote_code,
        )
    if as_json:
        typer.echo(json.dumps(record(found)))
    else:
        from rich.console import Console

        _print(Console(), found)
    if not found.usable:
        raise typer.Exit(EXIT_UNUSABLE)


def record(found: CheckReport) -> dict[str, Any]:
    """The report as JSON values."""
    return {
        "usable": found.usable,
        "acceptance_judged": found.acceptance_judged,
        "target": found.target,
        "draft": found.draft,
        "description": {row.name: {"value": row.value, "origin": row.origin} for row in found.rows},
        "findings": [dataclasses.asdict(finding) for finding in found.findings],
        "probe": None if found.figures is None else _figures(found.figures),
    }


def _figures(figures: Figures) -> dict[str, Any]:
    fit = figures.temperature()
    return {
        "num_prompts": figures.num_prompts,
        "num_places": figures.num_places,
        "acceptance_length": report.number(figures.acceptance_length),
        "acceptance_per_slot": [report.number(share) for share in figures.acceptance_per_slot],
        "agreement": report.number(figures.agreement) if figures.num_places else None,
        "variants": {
            name: {"agreement": one.mean, "gain": one.gain, "deviations": report.number(one.deviations)}
            for name, one in figures.comparisons().items()
        },
        "temperature": None if fit is None else dataclasses.asdict(fit),
        "rounds_replayed": len(figures.replayed),
    }


def _print(console: Console, found: CheckReport) -> None:
    from rich.table import Table
    from rich.text import Text

    if found.rows:
        table = Table(title="how the pair is read", title_justify="left", show_header=False)
        for row in found.rows:
            table.add_row(row.name, Text(row.value), Text(row.origin, style="dim"))
        console.print(table)
    if found.figures is not None and found.figures.num_places:
        _print_figures(console, found.figures, judged=found.acceptance_judged)
    for finding in found.findings:
        console.print(
            f"{finding.severity}: {finding.subject}: {finding.message}", markup=False, highlight=False, soft_wrap=True
        )
    console.print(f"verdict: {_verdict(found)}", markup=False, highlight=False, soft_wrap=True)


def _verdict(found: CheckReport) -> str:
    if not found.usable:
        return "not usable as it is"
    return "usable" if found.acceptance_judged else "read without contradiction; acceptance, anchor and taps not judged"


def _print_figures(console: Console, figures: Figures, *, judged: bool) -> None:
    from rich.table import Table

    table = Table(
        title=f"probe: {figures.num_prompts} prompts, {figures.num_places} places",
        title_justify="left",
        show_header=False,
    )
    table.add_row("acceptance length", f"{figures.acceptance_length:.2f} tokens per round")
    table.add_row("accepted by slot", " ".join(f"{share:.0%}" for share in figures.acceptance_per_slot))
    table.add_row("as configured", f"{figures.agreement:.2f} tokens per guess")
    for name, one in figures.comparisons().items():
        word = ("better" if one.is_better else "not better") if judged else "not judged"
        table.add_row(name, f"{one.mean:.2f} tokens per guess, {word} ({one.deviations:+.1f} standard errors)")
    fit = figures.temperature()
    if fit is not None:
        table.add_row(
            "draft temperature",
            f"{fit.theta:.2g} fits best: {fit.sampled:.0%} accepted per slot if sampled, {fit.argmax:.0%} by arg max "
            "(target at temperature 1)",
        )
    console.print(table)
