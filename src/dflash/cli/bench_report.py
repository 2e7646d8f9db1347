"""`dflash report`: records of benchmark runs as one page that needs nothing else, and as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders or record files that `dflash bench` has written.")],
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of report.html and report.md.")] = Path("."),
    table: Annotated[bool, typer.Option("--table", help="Print the Markdown instead of writing files.")] = False,
) -> None:
    """Show runs of `dflash bench` together: tables, charts and the worst prompts on one page.

    The page works without a network, and is written beside a Markdown version of its tables.
    """
    from dflash.bench.report.series import read_records
    from dflash.bench.report.write import render_markdown, write_report

    records = read_records(runs)
    if table:
        typer.echo(render_markdown(records), nl=False)
        return
    for path in write_report(records, out):
        typer.echo(str(path))
