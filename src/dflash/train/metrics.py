"""Training metrics: one JSON object per line, and TensorBoard where it is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any


class MetricsWriter:
    """Appends records to `metrics.jsonl`; drops what a killed run wrote after the checkpoint it resumes from."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = []
        if path.is_file() and resume_step:
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= resume_step:
                        kept.append(line)
                except (ValueError, KeyError):  # the line that was being written when the run was killed
                    continue
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._stream = path.open("a", encoding="utf-8")
        self._board: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append one record {"kind", "step", ...values}."""
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
