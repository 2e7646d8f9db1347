"""Files as the training side reads and writes them: JSON lines in, whole files out.

Knows how to name the line that is wrong and how to make a file appear complete or not at all (temporary
file, fsync, rename). Knows nothing about prompts, answers or models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash.errors import DataError

TEMPORARY_SUFFIX = ".tmp"
"""Ending of a file that is being written; whatever carries it is worthless after a crash."""


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for every line that is not blank.

    Raises:
        DataError: the file cannot be read, or a line is not one JSON object in UTF-8 (names file and line).
    """
    try:
        stream = path.open("rb")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(f"{path}: {reason}. Give a file of JSON lines (one JSON object per line).") from error
    with stream:
        for number, line in enumerate(stream, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are the former
                raise line_error(path, number, f"not JSON ({error}); every line must be one JSON object") from error
            if not isinstance(row, dict):
                raise line_error(path, number, f"holds a JSON {type(row).__name__}; every line must be one JSON object")
            yield number, row


def line_error(path: Path, number: int, what: str) -> DataError:
    """The error for one bad line; names file and line, and the cure."""
    return DataError(f"{path}:{number}: {what}. Mend or delete this line.")


def read_json_object(path: Path) -> dict[str, Any]:
    """Read one small JSON file that holds an object (a manifest, a run record).

    Raises:
        DataError: unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}). Delete it and prepare again.") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds a JSON {type(value).__name__}, not an object. Delete it and prepare again.")
    return value


def write_atomically(path: Path, data: bytes) -> None:
    """Make `path` hold `data`, completely or not at all, even across kill -9 and power loss.

    Raises:
        DataError: the file cannot be written (no space, no permission).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise DataError(f"{path}: cannot be written ({reason}). Free space or choose another folder.") from error


def write_json_atomically(path: Path, value: object) -> None:
    """Write `value` as indented JSON with `write_atomically`."""
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable; Windows has no such call and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
