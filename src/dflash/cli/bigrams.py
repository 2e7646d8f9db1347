"""`dflash bigrams`: count which tokens follow one another in the target's answers, for a draft that has no counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dflash.cli.options import output_option
from dflash.cli.progress import working
from dflash.errors import ConfigError


def bigrams(
    answers: Annotated[
        list[Path], typer.Argument(help="What `dflash prepare` wrote for the draft's target: folders, or JSONL files.")
    ],
    *,
    draft: Annotated[Path, typer.Option("--draft", "-d", metavar="FOLDER", help="Local folder of the draft.")],
    split_seed: Annotated[
        int,
        typer.Option(
            "--split-seed", min=0, metavar="N", help="data.split_seed of the draft's training: what it holds out."
        ),
    ] = 0,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="Count only so many answers.")
    ] = None,
    as_json: Annotated[bool, output_option("--json", help="Print one JSON record.")] = False,
) -> None:
    """Count neighbouring tokens of answers, so that a draft's guesses fit together.

    `dflash train` does it for the drafts that it makes; this is for others. It writes one file beside the draft's
    weights, which stay as they are; other programs ignore it.
    """
    if not draft.is_dir():
        raise ConfigError(f"--draft {draft} is no folder: the counts are written beside a draft of your own.")
    with working("counting") as progress:
        progress(f"reading {', '.join(map(str, answers))}", None)
        from dflash.train.bigrams import count_bigrams

        done = count_bigrams(answers, draft, split_seed=split_seed, limit=limit)
    if as_json:
        record = {"file": str(done.file), "answers": done.num_answers, "tokens": done.num_tokens}
        typer.echo(json.dumps(record | {"pairs": done.num_pairs}))
    else:
        where = f"{done.num_tokens} tokens of {done.num_answers} answers"
        typer.echo(f"{done.file}: {done.num_pairs} pairs of neighbours in {where}")
