"""Where figures come from: code revision, package versions, machine, hashes of weights and data. No model library."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

from dflash.cache import file_sha256

PACKAGES = ("dflash", "torch", "transformers", "numpy", "tokenizers", "safetensors", "mlx", "mlx-lm", "vllm", "sglang")
MAX_HASHED_BYTES = 16 * 2**30
"""Weights beyond this are not hashed: reading them takes longer than a short benchmark."""


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of the installed ones among `names`, and Python's."""
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_revision(folder: Path | None = None) -> str | None:
    """Commit of the checkout that this code runs from, with "-dirty" behind it if tracked files were changed; None
    outside of a checkout."""
    place = folder or Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            cwd=place,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        inside = subprocess.run(
            ["git", "ls-files", "--error-unmatch", str(Path(__file__).name if folder is None else ".")],
            cwd=place,
            capture_output=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode or inside.returncode:  # an installation below somebody else's checkout is not that checkout
        return None
    return done.stdout.strip() or None


def machine() -> dict[str, str | int | None]:
    """Processor, cores, memory and system of this machine."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "usable_cpus": len(affinity(0)) if affinity else None,
        "memory_bytes": _memory(),
    }


def weights_sha256(path: Path) -> str | None:
    """Hash of a model's weights: of the file, or of a folder's *.safetensors files in the order of their names. None
    if there are none, or more than `MAX_HASHED_BYTES`."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files or sum(file.stat().st_size for file in files) > MAX_HASHED_BYTES:
        return None
    if len(files) == 1:
        return file_sha256(files[0])
    together = hashlib.sha256()
    for file in files:
        together.update(f"{file.name} {file_sha256(file)}\n".encode())
    return together.hexdigest()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
