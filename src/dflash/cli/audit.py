"""`dflash audit`: is decoding with this draft lossless on this machine? Exit code 0 if so, 1 if a fault was found."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.cli import report
from dflash.cli.demo import questions
from dflash.cli.options import DraftArgument, MachineOptions, TargetArgument, output_option, with_options
from dflash.cli.progress import progress_bar
from dflash.cli.session import loader
from dflash.resolve import AUTO

if TYPE_CHECKING:
    from rich.console import Console

    from dflash.audit.run import AuditReport
    from dflash.audit.texts import TextAudit
    from dflash.core.textshare import TextShare

EXIT_FAULT = 1


@with_options
def audit(
    target: TargetArgument,
    draft: DraftArgument = AUTO,
    *,
    machine: MachineOptions,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", metavar="N", min=1, help="Most tokens per greedy answer.")
    ] = 48,
    runs: Annotated[int, typer.Option("--runs", metavar="N", min=1, help="Sampled runs of the chi-square test.")] = 32,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help='JSONL with a "prompt" per line (default: four built-in ones).'),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="Use only the first prompts.")] = None,
    as_json: Annotated[bool, output_option("--json", help="Print one JSON record instead of tables.")] = False,
) -> None:
    """Prove on this machine that a draft changes nothing, or show where it does.

    Compares texts with and without the draft and with the bare model, bits of forwards of different widths, layer
    states after rejected rows, and the law of sampled tokens. Ends with exit code 1 if a fault was found.
    """
    asked = questions(prompts, limit)
    with progress_bar("starting") as progress:
        from dflash.audit.run import Workload
        from dflash.audit.run import audit as run
        from dflash.check.prompts import prompt_ids

        engine = loader(machine.backend)(
            target,
            draft,
            dtype=machine.dtype,
            device=machine.device,
            num_threads=machine.threads,
            trust_remote_code=machine.trust_remote_code,
            progress=progress,
        )
        named = [(prompt.id, prompt_ids(engine, prompt)) for prompt in asked]
        workload = Workload(max_new_tokens=max_new_tokens, num_runs=runs)
        found = run(engine, named, workload, progress=progress)
    if as_json:
        typer.echo(json.dumps(record(found)))
    else:
        from rich.console import Console

        _print(Console(), found)
    if not found.passed:
        raise typer.Exit(EXIT_FAULT)


def record(found: AuditReport) -> dict[str, Any]:
    """The report as JSON values."""
    return {
        "passed": found.passed,
        "failures": found.failures,
        "engine": report.engine_record(found.info),
        "must_agree": found.must_agree,
        "widths": dataclasses.asdict(found.widths),
        "window": found.window,
        "window_covered": found.window_covered,
        "rollbacks": [dataclasses.asdict(one) | {"passed": one.passed} for one in found.rollbacks],
        "trees": [dataclasses.asdict(one) | {"passed": one.passed} for one in found.trees],
        "texts": [
            {
                "prompt": text.prompt,
                "form": text.form,
                "num_tokens": text.num_tokens,
                "num_guesses": text.num_guesses,
                "num_branch_rows": text.num_branch_rows,
                "num_copied": text.num_copied,
                "acceptance_length": report.number(text.acceptance_length),
                "first_difference": text.difference and dataclasses.asdict(text.difference),
                "stranger": text.stranger and dataclasses.asdict(text.stranger),
                **shares(text.share),
            }
            for text in found.texts
        ],
        **shares(found.share),
        "seed_difference": found.seed_difference,
        "laws": [dataclasses.asdict(law) | {"passed": law.passed} for law in found.laws],
    }


def shares(share: TextShare) -> dict[str, float | None]:
    """Loops and copies of a text, as JSON values."""
    return {
        "looping_share": report.number(share.looping),
        "copied_share": report.number(share.copied),
        "repeated_share": report.number(share.repeated),
    }


def _print(console: Console, found: AuditReport) -> None:
    from rich.table import Table

    console.print(report.engine_line(found.info), highlight=False, markup=False, soft_wrap=True)
    table = Table(title="what was tried", title_justify="left")
    for heading in ("", "tried", "result"):
        table.add_column(heading)
    for name, tried, result in _rows(found):
        table.add_row(name, tried, result)
    console.print(table)
    for text in found.texts:
        one = text.difference
        if one is not None:
            line = (
                f"{text.prompt}, {text.form}: token {one.position}: plain {one.plain!r}, DFlash {one.drafted!r}; "
                f"top-2 margin {one.margin:.3g}, distance {one.distance:.3g}, rounding explains {one.tolerance:.2g}: "
                f"{one.verdict}"
            )
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for form in _forms(found):
        if not any(text.num_guesses for text in found.texts if text.form == form):
            line = f"note: {form}: no guess was fed, so that this form was not tried; ask for longer answers (-n)"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for failure in found.failures:
        console.print(f"FAULT: {failure}", markup=False, highlight=False, soft_wrap=True)
    verdict = "no fault was found" if found.passed else f"{len(found.failures)} faults were found; please report them"
    console.print(f"verdict: {verdict}", markup=False, highlight=False, soft_wrap=True)


def _rows(found: AuditReport) -> list[tuple[str, str, str]]:
    widths, share = found.widths, found.share
    kinds = ", ".join(f"{count} {name}" for name, count in widths.kinds.items())
    classes = " ".join(f"{{{', '.join(map(str, one))}}}" for one in widths.classes)
    promised = "not promised here" if widths.promised is None else f"promised from {widths.promised} on"
    rows = [
        ("width classes", f"{found.info.dtype} on {found.info.device}; {kinds}", classes),
        (
            "same bits",
            f"{widths.num_rows} rows of all layers, single steps and blocks with rejected tails",
            f"{widths.num_equal} equal ({promised}), largest logit difference {widths.largest:.2g}",
        ),
    ]
    for rollback in found.rollbacks:
        worst = f"logits within {rollback.oracle_error:.2g} of the bare model's"
        result = "no trace" if not rollback.faults else f"{len(rollback.faults)} faults"
        rows.append(("rejected rows", f"{rollback.num_cases} kept counts, {kinds}", f"{result}; {worst}"))
    for tree in found.trees:
        worst = f"logits within {tree.error:.2g} of the bare model's"
        tried = f"{tree.num_paths} paths of a tree, {tree.num_rows} rows"
        rows.append(("branches", tried, f"{'no trace' if tree.passed else 'a fault'}; {worst}"))
    if not found.window_covered:
        rows.append(("", f"the window of {found.window} tokens is too wide to try here", "not covered"))
    rows += [_texts_row(form, [text for text in found.texts if text.form == form]) for form in _forms(found)]
    seed = "same text" if found.seed_difference is None else f"part at token {found.seed_difference}"
    rows.append(("same seed", "one sampled answer, without a draft and in every form of chains", seed))
    for name, law in zip(("sampled runs", "decisions on one block"), found.laws, strict=True):
        rows.append(
            (
                name,
                f"{law.num_runs} seeds, {law.num_tokens} tokens",
                f"chi-square {law.chi_square:.1f}, p {law.p_value:.2g}",
            )
        )
    if not math.isnan(share.looping):
        rows.append(
            (
                "flattering text",
                "loops and copies are easy to guess",
                f"looping {share.looping:.0%}, copied from the prompt {share.copied:.0%}, "
                f"repeated {share.repeated:.0%}",
            )
        )
    return rows


def _forms(found: AuditReport) -> list[str]:
    return list(dict.fromkeys(text.form for text in found.texts))


def _texts_row(form: str, texts: Sequence[TextAudit]) -> tuple[str, str, str]:
    """What one form of drafting gave."""
    same = sum(text.difference is None for text in texts)
    said = sum(text.stranger is None for text in texts)
    tried = f"{len(texts)} greedy answers, {sum(text.num_tokens for text in texts)} tokens, "
    tried += f"{sum(text.num_guesses for text in texts)} guesses"
    if branches := sum(text.num_branch_rows for text in texts):
        tried += f" ({branches} on branches)"
    if copied := sum(text.num_copied for text in texts):
        tried += f", {copied} tokens from copies"
    return f"same tokens: {form}", tried, f"{same} as plain decoding, {said} as the bare model says"
