"""`dflash train`: a recipe in, a draft out. Everything about training is in the recipe and in `train/trainer.py`."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Annotated

import typer

from dflash.cli.errors import library_log
from dflash.cli.progress import working


def train(
    recipe: Annotated[Path, typer.Argument(help="YAML file: docs/training.md lists its keys.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Replace keys, such as optimizer.learning_rate=2e-4."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run folder's last checkpoint, as if never stopped.")
    ] = False,
) -> None:
    """Train a draft on the target's own answers.

    Kill it at any time; the same command with --resume continues to the same losses.
    """
    with working("starting") as progress, library_log(logging.INFO):
        from dflash.train.trainer import run_training

        summary = run_training(recipe, overrides or [], resume=resume, progress=progress)
    length = "" if math.isnan(summary.acceptance_length) else f", acceptance length {summary.acceptance_length:.2f}"
    typer.echo(f"{summary.draft}: a draft after {summary.steps} steps{length}. Use it with --draft {summary.draft}")
