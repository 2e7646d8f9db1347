"""Answers of a target: the rows a draft learns from, their files, and the manifest that closes a set.

An answers file holds one JSON object per line:

    {"id": "set/7", "source": "set", "prompt_ids": [..], "answer_ids": [..], "loss_mask": [1, 0, ..]}

`prompt_ids` is the prompt as the target was fed it (template applied), `answer_ids` what the target wrote,
its end token included where it was reached. `loss_mask` has one flag per answer token and says which may be
learned; without it all may. `id` and `source` may be absent. A set is one such file or a folder of them
(shards); `prepare` closes its folder with `manifest.json`, written last. No torch, no tokenizer: ids only.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash.cache import file_sha256
from dflash.errors import DataError
from dflash.prepare.jsonl import (
    line_error,
    read_json_lines,
    read_json_object,
    write_atomically,
    write_json_atomically,
)

MANIFEST_NAME = "manifest.json"
"""Present in a folder only when every shard of the set is there."""
RUN_NAME = "run.json"
"""Written by `prepare` before the first shard: what the run was started with."""
MANIFEST_FORMAT = "dflash-answers-1"
"""Identifies the layout of the manifest and of the rows."""
LARGEST_ID = 2**31 - 1
"""Token ids are kept in 32 bits, sign included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerRow:
    """One answer. Ids are held as 4-byte arrays: a set of 60 000 rows fits in some 80 MB."""

    id: str
    source: str
    prompt_ids: array[int]
    """Token ids of the prompt, [P], P >= 1."""
    answer_ids: array[int]
    """Token ids of the answer, [A], A >= 1."""
    loss_mask: array[int] | None = None
    """[A] of 0 or 1: which answer tokens may be learned; None = all."""

    @property
    def num_supervised(self) -> int:
        """Answer tokens that may be learned."""
        return len(self.answer_ids) if self.loss_mask is None else sum(self.loss_mask)

    @property
    def is_empty(self) -> bool:
        """True when nothing can be learned: a block needs an anchor and one label inside the answer."""
        return self.num_supervised < 2

    def to_json(self) -> str:
        """The row as one line of an answers file, without the line end."""
        row: dict[str, Any] = {"id": self.id, "source": self.source}
        row |= {"prompt_ids": self.prompt_ids.tolist(), "answer_ids": self.answer_ids.tolist()}
        if self.loss_mask is not None:
            row["loss_mask"] = self.loss_mask.tolist()
        return json.dumps(row, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What the manifest says of one shard."""

    name: str
    sha256: str
    num_rows: int
    num_empty: int
    """Rows from which nothing can be learned (the end token alone)."""
    num_prompt_tokens: int
    num_answer_tokens: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The list that closes a set of shards."""

    run: Mapping[str, Any]
    """What the set was made with: prompts, target, options (see run.py)."""
    num_skipped: int
    """Answers left out because their prompt was longer than the run allowed."""
    shards: tuple[ShardRecord, ...]

    def total(self, field: str) -> int:
        """Sum of a count of `ShardRecord` over all shards."""
        return sum(getattr(shard, field) for shard in self.shards)


def write_shard(path: Path, rows: Iterable[AnswerRow]) -> ShardRecord:
    """Write one shard so that it is complete or absent.

    Raises:
        DataError: the file cannot be written.
    """
    kept = list(rows)
    write_atomically(path, "".join(row.to_json() + "\n" for row in kept).encode())
    return describe_shard(path, kept)


def describe_shard(path: Path, rows: Iterable[AnswerRow]) -> ShardRecord:
    """Count the rows of a shard that lies at `path`."""
    kept = list(rows)
    return ShardRecord(
        name=path.name,
        sha256=file_sha256(path),
        num_rows=len(kept),
        num_empty=sum(row.is_empty for row in kept),
        num_prompt_tokens=sum(len(row.prompt_ids) for row in kept),
        num_answer_tokens=sum(len(row.answer_ids) for row in kept),
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Close the set in `folder`. Call it last.

    Raises:
        DataError: the file cannot be written.
    """
    totals = ("num_rows", "num_empty", "num_prompt_tokens", "num_answer_tokens")
    value = {"format": MANIFEST_FORMAT, "run": dict(manifest.run), "num_skipped": manifest.num_skipped}
    value |= {"totals": {field: manifest.total(field) for field in totals}}
    value |= {"shards": [asdict(shard) for shard in manifest.shards]}
    write_json_atomically(folder / MANIFEST_NAME, value)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of `folder`, or None if there is none (yet).

    Raises:
        DataError: a manifest that is damaged or of another format.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        return None
    value = read_json_object(path)
    if value.get("format") != MANIFEST_FORMAT:
        raise DataError(
            f"{path}: format {value.get('format')!r}, this version reads {MANIFEST_FORMAT!r}. "
            "Prepare the answers again with this version, or delete the manifest to read the shards as they are."
        )
    try:
        shards = tuple(ShardRecord(**shard) for shard in value["shards"])
        return Manifest(run=value["run"], num_skipped=value["num_skipped"], shards=shards)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error}). Delete it and run the same prepare command again.") from error


def answer_files(path: Path, *, allow_partial: bool = False) -> list[Path]:
    """Files of the set at `path` in order: the file itself, a closed folder's shards (checked against the
    manifest), or every *.jsonl of a folder that `prepare` did not make.

    `allow_partial` takes what a `prepare` run that has not finished has written so far.

    Raises:
        DataError: nothing there, an unfinished run, or shards that differ from their manifest.
    """
    if not path.is_dir():
        if not path.exists():
            raise DataError(f"{path}: no such file or folder. Make answers with `dflash prepare`.")
        return [path]
    manifest = read_manifest(path)
    if manifest is not None:
        return [_checked_shard(path, shard) for shard in manifest.shards]
    if (path / RUN_NAME).exists() and not allow_partial:
        raise DataError(
            f"{path}: this prepare run has not finished. Run the same `dflash prepare` command again: "
            "it goes on where it stopped."
        )
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise DataError(f"{path}: holds no answers (*.jsonl). Make some with `dflash prepare --out {path}`.")
    return files


def read_answers(path: Path, *, vocab_size: int | None = None, allow_partial: bool = False) -> Iterator[AnswerRow]:
    """Yield every row of the set at `path` (file or folder) in order.

    `vocab_size` is the target's: ids at or above it are refused, they belong to another target.

    Raises:
        DataError: see `answer_files`; or a bad row (names file and line).
    """
    for file in answer_files(path, allow_partial=allow_partial):
        yield from read_shard(file, vocab_size=vocab_size)


def read_shard(path: Path, *, vocab_size: int | None = None) -> Iterator[AnswerRow]:
    """Yield the rows of one answers file; arguments and errors as in `read_answers`."""
    for number, row in read_json_lines(path):
        try:
            answer = _parse(row, number)
        except ValueError as error:
            raise line_error(path, number, str(error)) from error
        largest = max(max(answer.prompt_ids), max(answer.answer_ids))
        if vocab_size is not None and largest >= vocab_size:
            raise DataError(
                f"{path}:{number}: token id {largest} lies outside the target's vocabulary of {vocab_size}: these "
                "answers come from another target. Train with that one, or prepare answers with this one."
            )
        yield answer


def _checked_shard(folder: Path, shard: ShardRecord) -> Path:
    path = folder / shard.name
    if not path.is_file() or file_sha256(path) != shard.sha256:
        state = "differs from its manifest" if path.is_file() else "is missing"
        raise DataError(
            f"{path}: {state}. Delete {folder / MANIFEST_NAME} and this shard, then run the same "
            "`dflash prepare` command again: it makes only what is missing."
        )
    return path


def _parse(row: Mapping[str, Any], number: int) -> AnswerRow:
    answer_ids = _ids(row, "answer_ids")
    return AnswerRow(
        id=str(row.get("id", f"line-{number}")),
        source=str(row.get("source", "")),
        prompt_ids=_ids(row, "prompt_ids"),
        answer_ids=answer_ids,
        loss_mask=_mask(row["loss_mask"], len(answer_ids)) if row.get("loss_mask") is not None else None,
    )


def _ids(row: Mapping[str, Any], key: str) -> array[int]:
    if key not in row:
        raise ValueError(f"{key!r} is missing (an answers row has 'prompt_ids' and 'answer_ids')")
    ids = _integers(row[key], key)
    if not ids:
        raise ValueError(f"{key!r} is empty")
    if min(ids) < 0:
        raise ValueError(f"{key!r} holds the negative id {min(ids)}")
    return ids


def _mask(value: object, num_answer_tokens: int) -> array[int]:
    mask = _integers(value, "loss_mask")
    if len(mask) != num_answer_tokens:
        raise ValueError(f"'loss_mask' has {len(mask)} flags for {num_answer_tokens} answer tokens")
    if not set(mask) <= {0, 1}:
        raise ValueError("'loss_mask' may hold 0 and 1 only")
    return mask


def _integers(value: object, key: str) -> array[int]:
    if not isinstance(value, list):
        raise ValueError(f"{key!r} must be a list of integers")
    try:
        return array("i", value)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{key!r} must be a list of integers below {LARGEST_ID + 1} ({error})") from error
