"""What the user sees when something is wrong: one line on standard error and exit code 2, never a traceback.

Only mistakes that the user can mend are caught: our own error tree (`dflash/errors.py`) and files that the
operating system refuses. Anything else is a fault of ours and keeps its traceback for the bug report.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from typing import Any

import typer

from dflash.errors import DFlashError

EXIT_USER_ERROR = 2

_UsageError: Any = typer.BadParameter.__base__
"""What Typer raises for an unknown option or a missing argument; it gives no public name to it."""


@contextlib.contextmanager
def reported(command: str = "dflash") -> Iterator[None]:
    """Run a command; turn a user's error into a line and `SystemExit(2)`, the library's warnings into lines.

    `command`: whose page of help a usage error names. Typer must not report those by itself
    (`standalone_mode=False`): it draws boxes around them.
    """
    try:
        with library_log(logging.WARNING):
            yield
    except DFlashError as error:
        _fail(str(error))
    except _UsageError as error:
        message = error.format_message().strip().rstrip(".")
        _fail(f"{message[:1].lower()}{message[1:]}; `{command} --help` lists what there is.")
    except OSError as error:
        # Without a file name it is no file of the user's; a closed pipe (`| head`) is no error to talk about.
        if error.filename is None or error.errno == errno.EPIPE:
            raise
        _fail(f"{error.filename}: {error.strerror}. Check the path and its permissions.")


def say(message: str) -> None:
    """One line on standard error, whatever line breaks the message holds."""
    typer.echo(f"dflash: {' '.join(message.split())}", err=True)


@contextlib.contextmanager
def library_log(level: int) -> Iterator[None]:
    """Show what the library logs at `level` and above, for the time of the block."""
    logger = logging.getLogger("dflash")
    handler, before = _LinePerRecord(level), logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _LinePerRecord(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        say(prefix + record.getMessage())


def _fail(message: str) -> None:
    say(f"error: {message}")
    raise SystemExit(EXIT_USER_ERROR)
