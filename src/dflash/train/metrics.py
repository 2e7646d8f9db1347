"""Training metrics: one JSON object per line, and TensorBoard where it is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from dflash.prepare.jsonl import write_atomically

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends records to `metrics.jsonl`, each (kind, step) once: what a killed run wrote after the checkpoint that it
    resumes from is dropped, and a record that it wrote at that step is not written again."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        self._resume_step = resume_step
        self._at_resume: dict[str, dict[str, Any]] = {}
        kept = _records(path, resume_step) if path.is_file() and resume_step else []
        for record in kept:
            if record["step"] == resume_step:
                self._at_resume[record["kind"]] = record
        write_atomically(path, "".join(f"{json.dumps(record)}\n" for record in kept).encode())
        self._stream = path.open("a", encoding="utf-8")
        self._board: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step + 1)

    def earlier(self, kind: str, step: int) -> dict[str, Any] | None:
        """The record that an earlier process wrote at `step`, where that is the step at which this one resumed."""
        record = self._at_resume.get(kind) if step == self._resume_step else None
        return None if record is None else {key: value for key, value in record.items() if key not in ("kind", "step")}

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append one record {"kind", "step", ...values}, unless it is there from before."""
        if self.earlier(kind, step) is not None:
            return
        self._stream.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._stream.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flush and close."""
        self._stream.close()
        if self._board is not None:
            self._board.close()


def _records(path: Path, last_step: int) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            if record["step"] <= last_step and isinstance(record["kind"], str):
                kept.append(record)
        except (
            ValueError,
            RecursionError,
            KeyError,
            TypeError,
        ):  # the line that was being written when the run was killed
            continue
    return kept
