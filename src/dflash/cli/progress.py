"""Signs of life while something takes long: a spinner or a bar on a terminal, a plain line now and then elsewhere.

All of it goes to standard error. In a log file or a pipe the first line comes after ten seconds, the next ones every
ten seconds, later more rarely: hours of work leave some dozens of lines, a command of a few seconds none.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from dflash.cli.errors import say
from dflash.resolve import Progress
from dflash.types import Clock

if TYPE_CHECKING:
    from rich.console import Console

    from dflash.bench.runner import Tick

LEAST_SECONDS = 10.0
"""Before the first line and between two."""
LEAST_SHARE = 0.1
"""Of the time so far, between two lines."""


class Lines:
    """What is being done, as a line that is due from time to time."""

    def __init__(self, message: str, write: Callable[[str], None] = say, clock: Clock = time.monotonic) -> None:
        self._what, self._write, self._clock = message, write, clock
        self._share: float | None = None
        self._started = clock()
        self._due = self._started + LEAST_SECONDS

    def show(self, what: str, share: float | None) -> None:
        """What is being done from now on, and how much of it is finished."""
        self._what, self._share = what, share

    def seconds_left(self) -> float:
        """Until the next line is due."""
        return max(self._due - self._clock(), 0.0)

    def write_if_due(self) -> None:
        """Write the line if it is time."""
        now = self._clock()
        if now < self._due:
            return
        passed = now - self._started
        self._due = now + max(LEAST_SECONDS, LEAST_SHARE * passed)
        share = "" if self._share is None else f" {self._share:.0%}"
        self._write(f"{self._what}{share} ({timedelta(seconds=round(passed))})")


@contextlib.contextmanager
def working(message: str) -> Iterator[Progress]:
    """A spinner with the seconds so far. Yields a callback that takes (what is being done, share finished in 0..1 or
    None)."""
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    console = _terminal()
    if console is None:
        with _written_beside(Lines(message)) as show:
            yield show
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # Few refreshes: their thread takes its time from what is being waited for.
    with Bar(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(message)

        def spin(what: str, share: float | None) -> None:
            bar.update(task, description=what if share is None else f"{what} {share:.0%}")

        yield spin


@contextlib.contextmanager
def progress_bar(message: str) -> Iterator[Progress]:
    """As `working`, with a bar that fills where the share is known: for jobs of minutes."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = _terminal()
    if console is None:
        with _written_beside(Lines(message)) as show:
            yield show
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(message, total=None)

        def fill(what: str, share: float | None) -> None:
            bar.update(task, description=what, total=None if share is None else 1.0, completed=share or 0.0)

        yield fill


@contextlib.contextmanager
def counting(message: str, total: int, *, console: Console | None = None) -> Iterator[Tick]:
    """A bar that counts up to `total`, moved by whoever asks: no thread of its own, which would take its share of the
    cores from what is being timed. `console`: of a terminal other than standard error's."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = console or _terminal()
    if console is None:
        yield _counted_lines(message, total)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # No redirection: what goes to a file must not end up on the terminal that shows the bar.
    with Bar(*columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False) as bar:
        task = bar.add_task(message, total=total)
        bar.refresh()

        def tick(what: str, number: int) -> None:
            bar.update(task, description=what, advance=number, refresh=True)

        yield tick


def _terminal() -> Console | None:
    from rich.console import Console

    console = Console(stderr=True)
    return console if console.is_terminal else None


def _counted_lines(message: str, total: int) -> Tick:
    lines, done = Lines(message), 0

    def tick(what: str, number: int) -> None:
        nonlocal done
        done += number
        lines.show(f"{what}, {done} of {total}", None)
        lines.write_if_due()

    return tick


@contextlib.contextmanager
def _written_beside(lines: Lines) -> Iterator[Progress]:
    """Lines also while a single step takes long: a thread that sleeps until the next one is due."""
    ended = threading.Event()

    def write() -> None:
        while not ended.wait(lines.seconds_left()):
            lines.write_if_due()

    writer = threading.Thread(target=write, name="progress", daemon=True)
    writer.start()
    try:
        yield lines.show
    finally:
        ended.set()
        writer.join()
