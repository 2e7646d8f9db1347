"""The folder of a `prepare` run: who may write into it, and what in it is finished.

Knows run.json, the lock and the check of finished shards; does not know models. See run.py for the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dflash.errors import DataError
from dflash.prepare.answers import RUN_NAME, ShardRecord, describe_shard, read_shard
from dflash.prepare.jsonl import TEMPORARY_SUFFIX, read_json_object
from dflash.prepare.prompts import Conversation


@contextmanager
def locked_folder(out: Path) -> Iterator[None]:
    """Hold the output folder for one process, and clear what a killed one was writing.

    Raises:
        DataError: the folder cannot be made, or another process works in it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / ".lock", timeout=0)
        lock.acquire()
    except Timeout as error:
        raise DataError(f"{out}: another prepare run works in this folder. Wait for it, or choose another.") from error
    except OSError as error:
        raise DataError(f"{out}: {error.strerror or error}. Choose a folder that can be written.") from error
    try:
        for leftover in out.glob(f".*{TEMPORARY_SUFFIX}"):
            leftover.unlink(missing_ok=True)
        yield
    finally:
        lock.release()


def refuse_other_run(out: Path, run: dict[str, Any]) -> None:
    """Refuse to mix answers: what run.json says must hold now too, as far as it is known yet.

    Raises:
        DataError: another configuration, other prompts or another target (each difference named).
    """
    path = out / RUN_NAME
    if not path.exists():
        if any(out.glob("*.jsonl")):
            raise DataError(f"{out}: holds *.jsonl files but no {RUN_NAME}. Choose an empty folder.")
        return
    before = read_json_object(path)
    changed = [f"{key} was {before.get(key)!r}, now {run[key]!r}" for key in run if before.get(key) != run[key]]
    if changed:
        raise DataError(
            f"{out}: this run was begun otherwise ({'; '.join(changed)}). Go on with the same prompts, target and "
            "options, or choose another output folder."
        )


def finished_shard(path: Path, part: Sequence[Conversation]) -> ShardRecord:
    """Describe a shard of an earlier run after checking that its rows are those of its prompts, in order.

    Raises:
        DataError: rows are damaged, doubled or foreign.
    """
    rows = list(read_shard(path))
    remaining = iter([conversation.turn_id(turn) for conversation in part for turn in range(len(conversation.turns))])
    if not all(row.id in remaining for row in rows):  # `in` consumes: an ordered subset, each id at most once
        raise DataError(f"{path}: its rows are not the answers to its prompts. Delete this file and run again.")
    return describe_shard(path, rows)
