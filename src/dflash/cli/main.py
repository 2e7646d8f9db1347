"""The command `dflash`: a table of verbs, each imported only when it is asked for.

Nothing heavy is imported here or at the top of a verb's file, so that `dflash --help` and a mistyped option
answer at once; torch and Transformers come in when a verb opens a model.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dflash import __version__
from dflash.cli.errors import EXIT_USER_ERROR, reported, say
from dflash.errors import ConfigError

EXIT_ABORTED = 1

COMMANDS: dict[str, str] = {
    "demo": "dflash.cli.demo:demo",
    "generate": "dflash.cli.generate:generate",
    "chat": "dflash.cli.chat:chat",
    "check": "dflash.cli.check:check",
    "audit": "dflash.cli.audit:audit",
    "calibrate": "dflash.cli.calibrate:calibrate",
    "prepare": "dflash.cli.prepare:prepare",
    "train": "dflash.cli.train:train",
    "bigrams": "dflash.cli.bigrams:bigrams",
    "bench": "dflash.cli.bench:bench",
    "report": "dflash.cli.bench_report:report",
    "launch": "dflash.cli.launch:launch",
    "convert": "dflash.cli.convert:convert",
    "models": "dflash.cli.models:models",
}
"""Verb -> "module:function", in the order of the help page. A new verb is one file and one line here."""


class LazyCommands(TyperGroup):
    """A Typer group that looks its commands up in the table."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All verbs, in the table's order."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb's command, imported now; None for an unknown name (Typer then says so)."""
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        """The verb and its words. Raises ConfigError for a verb that there is not, with the nearest ones."""
        if args[0] not in COMMANDS:
            near = get_close_matches(args[0], COMMANDS)
            hint = f"did you mean {' or '.join(near)}?" if near else "`dflash --help` lists the commands."
            raise ConfigError(f"there is no command '{args[0]}'; {hint}")
        return super().resolve_command(ctx, args)


def load_command(name: str) -> Any:
    """Import the verb `name` and make it a command."""
    module, _, attribute = COMMANDS[name].partition(":")
    verb = typer.Typer(add_completion=False)
    verb.command(name=name)(getattr(importlib.import_module(module), attribute))
    return typer.main.get_command(verb)


app = typer.Typer(cls=LazyCommands, add_completion=False, pretty_exceptions_enable=False, name="dflash")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dflash {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Generate the same text with fewer forwards of the model: lossless block-diffusion speculative decoding."""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point: `args` = the words after `dflash`, by default the process's own. Ends with `SystemExit`.

    Without a word it shows the help, as if that had been asked for, but says by its code that nothing was done.
    """
    words = sys.argv[1:] if args is None else args
    with reported(" ".join(["dflash", *(word for word in words[:1] if word in COMMANDS)])):
        try:
            code = app(args if words else ["--help"], prog_name="dflash", standalone_mode=False)
        except typer.Abort:  # end of input, or Ctrl-C with an older Typer
            say("aborted.")
            code = EXIT_ABORTED
    raise SystemExit(code or 0 if words else EXIT_USER_ERROR)
