"""Peak memory of this process, where the operating system tells it.

For engines that run inside this process; a server's memory is not seen from here.
"""

from __future__ import annotations

import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_CLEAR_PEAK = "5"
"""Written to clear_refs, it sets the peak back to what is resident now (Linux 4.0 and later)."""


class ProcessMemory:
    """The most resident memory since `start`."""

    def __init__(self, *, status: Path = _STATUS, clear: Path = _CLEAR) -> None:
        self._status = status
        self._clear = clear

    def start(self) -> bool:
        """Forget the peak so far; whether that was possible (if not, the peak is that of the whole process)."""
        try:
            self._clear.write_text(_CLEAR_PEAK, encoding="ascii")
        except OSError:
            return False
        return True

    def peak_bytes(self) -> int | None:
        """Peak resident memory; None if this system does not tell it."""
        try:
            for line in self._status.read_text(encoding="ascii").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except (OSError, ValueError, IndexError):
            return None
        return self._of_the_process()

    def _of_the_process(self) -> int | None:
        """Since the process started; the unit differs by system."""
        if sys.platform == "win32":
            return None
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
