"""`dflash chat`: a conversation in the terminal. Ctrl-C stops an answer, not the session."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from dflash.cli import report
from dflash.cli.errors import say
from dflash.cli.options import ChainOptions, SamplingOptions, with_options
from dflash.cli.session import open_engine
from dflash.errors import PromptError
from dflash.types import SamplingParams, Stats

if TYPE_CHECKING:
    from dflash.core.engine import Engine

PROMPT = "> "


@with_options
def chat(
    *,
    model: ChainOptions,
    sampling: SamplingOptions,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message of the conversation.")
    ] = None,
) -> None:
    """Talk with the target, turn by turn.

    /stats, /reset, /help and /exit are commands; Ctrl-C stops an answer, Ctrl-D leaves.
    """
    params = sampling.params()
    conversation = Conversation(open_engine(model), params, system)
    if sys.stdin.isatty():
        _enable_line_editing()
        typer.echo(f"{model.target}: write a message, or /help.")
    while (line := _read_line()) is not None and not _is_exit(line):
        if not line:
            continue
        if line.startswith("/"):
            typer.echo(_command(conversation, line))
        else:
            _answer(conversation, line)


@dataclass
class Conversation:
    """The messages so far and the figures of the answers."""

    engine: Engine
    params: SamplingParams
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    """Alternating user and assistant messages, without the system message."""
    stats: list[Stats] = field(default_factory=list)
    """One per answer."""

    def messages(self) -> Sequence[Mapping[str, str]]:
        """What the chat template gets."""
        first = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*first, *self.turns]

    def reset(self) -> None:
        """Forget all turns and figures."""
        self.turns.clear()
        self.stats.clear()

    def answer(self, text: str, stopped: Callable[[], bool]) -> Generator[str, None, None]:
        """Yield the answer to `text` piece by piece and remember both; `stopped()` ends it between two rounds,
        and what was said until then stays part of the conversation.

        Raises PromptError when the conversation no longer fits; the turn is then taken back.
        """
        self.turns.append({"role": "user", "content": text})
        pieces: list[str] = []
        stats: Stats | None = None
        try:
            with contextlib.closing(self.engine.stream(self.messages(), self.params)) as events:
                for event in events:
                    stats = event.stats
                    pieces.append(event.text)
                    yield event.text
                    if stopped():
                        break
        finally:
            # Also when the consumer gives up or the engine refuses: user and assistant must go on alternating.
            if stats is None:
                self.turns.pop()
            else:
                self.turns.append({"role": "assistant", "content": "".join(pieces)})
                self.stats.append(stats)


def _answer(conversation: Conversation, line: str) -> None:
    try:
        with _ctrl_c() as stopped, contextlib.closing(conversation.answer(line, stopped)) as pieces:
            for piece in pieces:
                typer.echo(piece, nl=False)
            typer.echo(" [stopped]" if stopped() else "")
    except KeyboardInterrupt:  # the second Ctrl-C: do not even wait for the round
        typer.echo(" [stopped]")
    except PromptError as error:
        say(f"{error} /reset starts a new conversation.")


@contextlib.contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Within: the first Ctrl-C only sets a flag, so that a round ends whole; the second interrupts at once."""
    pressed = False

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _read_line() -> str | None:
    """The next line without blanks around it; None at the end of input. Ctrl-C clears a half-written line."""
    while True:
        try:
            return input(PROMPT if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            typer.echo("\n(/exit or Ctrl-D leaves)")


def _is_exit(line: str) -> bool:
    return line in ("/exit", "/quit")


def _command(conversation: Conversation, line: str) -> str:
    """Carry out a line that begins with a slash; returns what to show."""
    if line == "/reset":
        conversation.reset()
        return "The conversation starts anew."
    if line == "/stats":
        return _figures(conversation.stats)
    known = "/stats  figures of the answers\n/reset  start anew\n/help   this list\n/exit   leave (or Ctrl-D)"
    return known if line == "/help" else f"Unknown command {line.split()[0]}. Commands:\n{known}"


def _figures(answers: Sequence[Stats]) -> str:
    if not answers:
        return "No answer yet."
    lines = [f"answer {index}: {report.stats_line(stats)}" for index, stats in enumerate(answers, start=1)]
    seconds = sum(stats.decode_seconds for stats in answers)
    lengths = [length for stats in answers for length in stats.acceptance_lengths]
    if seconds and lengths:
        speed = report.tokens_per_second(sum(lengths) / seconds)
        lines.append(f"all: {speed} · {sum(lengths) / len(lengths):.2f} tokens per round")
    return "\n".join(lines)


def _enable_line_editing() -> None:
    """Arrow keys and history for `input`, where the platform has them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
