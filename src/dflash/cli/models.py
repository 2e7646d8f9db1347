"""`dflash models`: which targets have a draft that is found by itself, and what of both is on this machine."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from dflash.cli.options import output_option
from dflash.core.published import PUBLISHED
from dflash.registry import DRAFTS, TARGETS

HERE, INSTALLABLE, ONLINE, SHIPPED = "here", "not installed", "on the hub", "shipped"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One pair."""

    target: str
    target_state: str
    """Here (installed or in the hub's cache), not installed, or on the hub."""
    draft: str
    draft_state: str
    """Shipped with this package, here or on the hub."""
    kind: str
    block_size: int | None
    mode: str | None
    note: str | None


def models(
    *,
    as_json: Annotated[bool, output_option("--json", help="Print one JSON record per pair.")] = False,
) -> None:
    """List targets and the drafts that are found for them, and where each is.

    The first draft of a target is the one that `--draft auto` takes; the others are named with `--draft`. Any other
    target works with a draft made for it, or trained by `dflash prepare` and `dflash train`.
    """
    rows = [*_built_in(), *_published()]
    if as_json:
        for row in rows:
            typer.echo(json.dumps(asdict(row)))
        return
    width = 2 + max(len(row.draft) for row in rows)
    said = None
    for row in rows:
        if row.target != said:
            said = row.target
            typer.echo(f"{row.target:<{width + 2}}  {row.target_state}")
        about = [row.kind] + ([f"block {row.block_size}"] if row.block_size else [])
        about += [f"for {row.mode} answers"] if row.mode else []
        about += [row.note] if row.note and row.draft_state != SHIPPED else []
        typer.echo(f"  {row.draft:<{width}}  {row.draft_state:<10}  {', '.join(about)}")


def _built_in() -> list[Row]:
    rows = []
    for name, draft in DRAFTS.items():
        for target in draft.targets:
            rows.append(
                Row(
                    target=target,
                    target_state=_target_state(target),
                    draft=name,
                    draft_state=SHIPPED,
                    kind="dflash",
                    block_size=_block_size(draft.folder),
                    mode=None,
                    note=draft.description,
                )
            )
    return rows


def _published() -> list[Row]:
    return [
        Row(
            target=entry.target,
            target_state=_hub_state(entry.target),
            draft=entry.draft,
            draft_state=_hub_state(entry.draft),
            kind=entry.kind,
            block_size=entry.block_size,
            mode=entry.mode,
            note=entry.note,
        )
        for entry in sorted(PUBLISHED, key=lambda entry: entry.target)
    ]


def _target_state(target: str) -> str:
    built_in = TARGETS.get(target)
    if built_in is None:
        return _hub_state(target)
    try:
        importlib.metadata.distribution(built_in.distribution)
    except importlib.metadata.PackageNotFoundError:
        return INSTALLABLE
    return HERE


def _hub_state(repository: str) -> str:
    from huggingface_hub import try_to_load_from_cache

    return HERE if isinstance(try_to_load_from_cache(repository, "config.json"), str) else ONLINE


def _block_size(folder: str) -> int:
    from pathlib import Path

    import dflash
    from dflash.core.draft_reader import read_draft_config

    return read_draft_config(Path(dflash.__file__).parent / folder).block_size
