"""`dflash generate`: one prompt in, one text out, streamed as it is committed."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.cli import report
from dflash.cli.errors import say
from dflash.cli.options import ChainOptions, SamplingOptions, output_option, with_options
from dflash.cli.progress import working
from dflash.cli.session import open_engine, read_stdin
from dflash.errors import PromptError
from dflash.types import Round, Stats

if TYPE_CHECKING:
    from dflash.core.engine import Engine

STDIN = "-"


@with_options
def generate(
    prompt: Annotated[
        str, typer.Argument(help="The prompt; '-' or nothing = standard input.", show_default=False)
    ] = STDIN,
    *,
    model: ChainOptions,
    sampling: SamplingOptions,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message of the chat template.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the plain text, without the chat template.")] = False,
    as_json: Annotated[
        bool,
        output_option("--json", help="Print one JSON record at the end instead of the text."),
    ] = False,
    stream: Annotated[bool, output_option("--stream/--no-stream", help="Print the text while it is made.")] = True,
    profile: Annotated[
        bool,
        output_option("--profile", help="Show where each round's time went: draft, verify, other."),
    ] = False,
) -> None:
    """Answer one prompt.

    The text goes to standard output, figures and errors to standard error.
    """
    params = sampling.params()
    text = _prompt_text(prompt)
    if raw and system is not None:
        raise PromptError("--system belongs to the chat template, which --raw switches off: leave one of them out.")
    messages: str | list[dict[str, str]] = text
    if system is not None:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    engine = open_engine(model)

    pieces: list[str] = []
    token_ids: list[int] = []
    rounds: list[Round] = []
    stats = Stats()
    with contextlib.ExitStack() as display:
        silent = as_json or not stream
        show = display.enter_context(working("waiting for the first token")) if silent else None
        for event in engine.stream(messages, params, raw=raw, profile=profile):
            pieces.append(event.text)
            token_ids += event.token_ids
            rounds.append(event.round)
            stats = event.stats
            if show is not None:
                show(f"{len(token_ids)} tokens", None)
            elif event.text:
                typer.echo(event.text, nl=False)
    if as_json:
        typer.echo(json.dumps(_record(engine, "".join(pieces), token_ids, stats, rounds if profile else None)))
    else:
        typer.echo("" if stream else "".join(pieces))
    if profile and not as_json:
        _print_profile(rounds, stats)
    if sys.stderr.isatty():
        say(report.stats_line(stats))


def _prompt_text(prompt: str) -> str:
    """The argument, or standard input without its last line break. Raises `PromptError` if there is neither."""
    if prompt != STDIN:
        return prompt
    if sys.stdin.isatty():
        raise PromptError("no prompt: write it behind `dflash generate`, or send it to standard input.")
    text = read_stdin().removesuffix("\n")
    if not text:
        raise PromptError("standard input holds no prompt: send some text, or write it behind `dflash generate`.")
    return text


def _record(
    engine: Engine, text: str, token_ids: list[int], stats: Stats, rounds: list[Round] | None
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": text,
        "token_ids": token_ids,
        "finish_reason": stats.finish_reason,
        "stats": report.stats_record(stats),
        "engine": report.engine_record(engine.info),
    }
    if rounds is not None:
        record["rounds"] = [report.round_record(step) for step in rounds]
    return record


def _print_profile(rounds: list[Round], stats: Stats) -> None:
    from rich.console import Console

    Console(stderr=True).print(report.profile_table(rounds, stats))
