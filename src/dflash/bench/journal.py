"""What a run has measured so far, on disk: one line per batch, so that nothing is lost when a run ends early.

A journal begins with the fingerprint of what is asked (`workload.py`); resuming with other questions or settings is
refused, because their figures must not be mixed. A last line that was cut off by a crash is dropped.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dflash.bench.record import SCHEMA, BatchPart
from dflash.errors import ConfigError, DataError


class Journal:
    """An append-only file of batches; a batch that was asked again replaces its earlier one when read."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Wall time of the earlier sittings."""
        return self._seconds

    def refuse_existing(self) -> None:
        """Raise ConfigError if there is a journal already."""
        if self._path.exists():
            raise ConfigError(f"{self._path} exists already: continue it with --resume, or choose another --out.")

    def start(self) -> None:
        """Begin a new journal. Raises ConfigError if there is one already."""
        self.refuse_existing()
        self._write({"schema": SCHEMA, "fingerprint": self._fingerprint})

    def resume(self) -> list[BatchPart]:
        """Batches of an earlier sitting. Raises DataError (unreadable), ConfigError (other questions or settings)."""
        try:
            lines = self._path.read_bytes().split(b"\n")
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise DataError(
                f"{self._path}: {reason}. Give the folder of a run that was stopped to --resume."
            ) from error
        complete, cut = lines[:-1], lines[-1]
        if cut:  # a crash while it was written: drop it, and never append behind it
            with self._path.open("r+b") as stream:
                stream.truncate(sum(len(line) + 1 for line in complete))
        rows = [self._parsed(line, number) for number, line in enumerate(complete, start=1)]
        if not rows or rows[0].get("schema") != SCHEMA:
            raise DataError(f"{self._path}: is no journal of this version's benchmark; start the run anew.")
        if rows[0].get("fingerprint") != self._fingerprint:
            raise ConfigError(
                f"{self._path} was made with other questions, settings, forms or weights; give the same options "
                "as then, or start a new run with another --out."
            )
        batches: dict[object, BatchPart] = {}
        for number, row in enumerate(rows[1:], start=2):
            if "sitting_seconds" in row:
                self._seconds += row["sitting_seconds"]
                continue
            try:
                batch = BatchPart.model_validate(row)
            except ValidationError as error:
                raise DataError(
                    f"{self._path}:{number}: is not a batch of this version; start the run anew."
                ) from error
            batches[batch.key] = batch
        return list(batches.values())

    def add(self, batch: BatchPart) -> None:
        """Keep a batch, on the disk before this returns."""
        self._write(batch.model_dump(mode="json"))

    def end_sitting(self, seconds: float) -> None:
        """Keep how long this sitting took."""
        self._write({"sitting_seconds": seconds})

    def _write(self, row: object) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            reason = error.strerror or str(error)
            raise DataError(f"{self._path}: cannot be written ({reason}). Choose another --out.") from error

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self._path}:{number}: not JSON ({error}). Delete this line and resume.") from error
        if not isinstance(row, dict):
            raise DataError(f"{self._path}:{number}: not a JSON object. Delete this line and resume.")
        return row
