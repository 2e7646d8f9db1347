"""`dflash convert`: a draft checkpoint from one layout into another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash.cli.options import model_option, output_option
from dflash.cli.progress import working
from dflash.resolve import Source, resolve_draft

if TYPE_CHECKING:
    from dflash.backends.torch.convert import Converted


def convert(
    draft: Annotated[str, typer.Argument(metavar="DRAFT", help="Hub id, local folder, GGUF file or built-in name.")],
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="LAYOUT",
            help="z-lab (DFlash, DFlash 2), speculators (DFlash, DSpark) or transformers (DFlash).",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="New folder of the converted draft.")],
    target: Annotated[
        str | None,
        model_option("--target", "-t", metavar="MODEL", help="The draft's target, where its embedding or head matter."),
    ] = None,
    as_json: Annotated[bool, output_option("--json", help="Print one JSON record.")] = False,
) -> None:
    """Write a draft in another layout, so that other programs read it.

    Weights keep their bytes. The new folder is read back before it gets its name; converting it back gives the first
    draft again.
    """
    with working("reading the draft") as progress:
        from dflash.backends.torch.convert import convert_draft

        source = resolve_draft(draft, Source(name=target or "", path=Path()), progress=progress)
        done = convert_draft(source.path, out, to, target=target)
    typer.echo(json.dumps(_record(done)) if as_json else _text(done))


def _record(done: Converted) -> dict[str, object]:
    return {
        "out": str(done.folder),
        "from": done.source_layout,
        "to": done.layout,
        "kind": done.config.kind,
        "dropped": list(done.dropped),
        "added": list(done.added),
    }


def _text(done: Converted) -> str:
    notes = [f"left out (the target's own): {', '.join(done.dropped)}"] if done.dropped else []
    notes += [f"taken from the target: {', '.join(done.added)}"] if done.added else []
    return f"{done.folder}: {done.config.kind} draft, {done.source_layout} -> {done.layout}" + "".join(
        f"; {note}" for note in notes
    )
