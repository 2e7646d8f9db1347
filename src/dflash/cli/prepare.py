"""`dflash prepare`: prompts in, the target's own answers out, with tokens per second and the time left."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash.cli.options import DEFAULT_TARGET, model_option, output_option, sampling_option
from dflash.cli.progress import progress_bar, working

if TYPE_CHECKING:
    from dflash.prepare.run import PrepareProgress, PrepareSummary


def prepare(
    prompts: Annotated[Path, typer.Argument(help='JSONL with "prompt", "turns" or "messages" per line.')],
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder of the answers; the same command resumes it.")
    ],
    target: Annotated[
        str,
        model_option("--target", "-t", metavar="MODEL", help="Hub id, local folder, GGUF file or built-in name."),
    ] = DEFAULT_TARGET,
    max_new_tokens: Annotated[
        int, sampling_option("--max-new-tokens", "-n", metavar="N", help="Most tokens per answer.")
    ] = 256,
    temperature: Annotated[float, sampling_option("--temperature", metavar="X", help="0 = greedy.")] = 0.0,
    seed: Annotated[int, sampling_option("--seed", metavar="N", help="Of the draws at a temperature above 0.")] = 0,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message of the chat template.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the plain text, without the chat template.")] = False,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", help="Prompts answered at once.")] = 64,
    shard_size: Annotated[
        int, typer.Option("--shard-size", metavar="N", help="Prompts per file; a kill loses at most one.")
    ] = 512,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="Use only the first prompts.")] = None,
    max_prompt_tokens: Annotated[
        int, typer.Option("--max-prompt-tokens", metavar="N", help="Leave longer prompts out (counted at the end).")
    ] = 1024,
    dtype: Annotated[str | None, model_option("--dtype", metavar="NAME", help="As in `dflash generate`.")] = None,
    device: Annotated[str | None, model_option("--device", metavar="NAME", help="As in `dflash generate`.")] = None,
    as_json: Annotated[bool, output_option("--json", help="Print the summary as one JSON record.")] = False,
) -> None:
    """Let the target answer a file of prompts: what its draft learns from.

    Run the same command again after an interruption: finished shards are kept, nothing is lost or doubled.
    """
    with working("starting"):
        from dflash.prepare import run as preparation
    with progress_bar(f"loading {target}") as show:

        def progress(state: PrepareProgress) -> None:
            show(describe(state), state.num_done / max(state.num_total, 1))

        summary = preparation.prepare(
            prompts,
            out,
            target,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            batch_size=batch_size,
            shard_size=shard_size,
            limit=limit,
            max_prompt_tokens=max_prompt_tokens,
            system=system,
            raw=raw,
            seed=seed,
            dtype=dtype,
            device=device,
            progress=progress,
        )
    typer.echo(json.dumps(asdict(summary) | {"out": str(summary.out)}) if as_json else _summary_text(summary))


def describe(progress: PrepareProgress) -> str:
    """'64 of 512 answers, 412 tok/s, 0:03:10 left', as far as it is known."""
    counted = f"{progress.num_done} of {progress.num_total} answers"
    if progress.seconds_left is None:
        return counted
    return f"{counted}, {progress.tokens_per_second:.0f} tok/s, {timedelta(seconds=round(progress.seconds_left))} left"


def _summary_text(summary: PrepareSummary) -> str:
    notes = [f"{summary.num_skipped} prompts left out as too long"] if summary.num_skipped else []
    notes += [f"{summary.num_empty} empty answers"] if summary.num_empty else []
    notes += [f"{summary.num_resumed_shards} shards were there already"] if summary.num_resumed_shards else []
    return (
        f"{summary.num_answers} answers ({summary.num_answer_tokens} tokens) in {summary.num_shards} files of "
        f"{summary.out}, {summary.tokens_per_second:.0f} tok/s" + "".join(f"; {note}" for note in notes)
    )
