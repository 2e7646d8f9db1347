"""How much memory this process may still take, as the system says it; knows nothing of models."""

from __future__ import annotations

from pathlib import Path


def available_bytes(*, meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be allocated without swapping, capped by the container's limit; None where it is not known.

    The paths are replaced in tests.
    """
    found = [amount for amount in (_system(meminfo), _container(group)) if amount is not None]
    return min(found, default=None)


def _system(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    except (OSError, ValueError, IndexError):  # not Linux, or not in this form
        return None


def _container(group: Path) -> int | None:
    """Limit of the control group less what it uses; the page cache, which gives way, is not counted as used."""
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        if limit == "max":
            return None
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
