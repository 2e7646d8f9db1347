"""The user's cache: where converted models lie, and how they get there whole or not at all.

Knows folders, checksums, locks and atomic renames; does not know models. This is the one place outside the
command line that reads environment variables: `DFLASH_CACHE`, else `XDG_CACHE_HOME`/dflash, else
~/.cache/dflash. A cached folder is complete exactly when its manifest, written last, names every file with its
size; a folder without one never becomes visible under its final name, since it is built elsewhere and renamed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dflash.errors import CheckpointError, ConfigError

SECONDS_PER_DAY = 86400.0
MANIFEST_FILE = "dflash-manifest.json"
_MANIFEST_VERSION = 1
_FIRST_LOCK_TRY_SECONDS = 0.2
_FULL = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})  # Windows has no quota error

Wait = Callable[[str], None]
"""Told once, in words, when another process holds the lock and we wait for it."""


def cache_root(environment: Mapping[str, str] | None = None) -> Path:
    """The cache folder (not created); `environment` replaces the process's variables in tests."""
    variables = os.environ if environment is None else environment
    if chosen := variables.get("DFLASH_CACHE"):
        return Path(chosen).expanduser()
    if shared := variables.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "dflash"
    return Path.home() / ".cache" / "dflash"


def files_sha256(paths: Iterable[Path]) -> str:
    """Of one file; of the files' hashes in order where there are several."""
    hashes = [file_sha256(path) for path in sorted(paths)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def prune(folder: Path, *, most: int, days: float, keep: Path | None = None, now: float | None = None) -> None:
    """Drop the files of a cache folder that nobody has used for `days`, and the longest unused ones beyond `most`.

    For files that are cheap to make again; one is used when its time of modification says so (`touch`). `keep` is never
    dropped; `now` (seconds of the epoch) replaces the clock in tests. Never fails: what cannot be looked at or removed,
    because another process has removed it or the folder is read-only, stays.
    """
    now = time.time() if now is None else now
    used: dict[Path, float] = {}
    try:
        files = list(folder.iterdir())
    except OSError:
        return
    for file in files:
        with suppress(OSError):
            if file.is_file():
                used[file] = file.stat().st_mtime
    if keep is not None:
        used.pop(keep, None)
        most -= 1
    newest_first = sorted(used, key=lambda file: used[file], reverse=True)
    for place, file in enumerate(newest_first):
        if place >= most or now - used[file] > days * SECONDS_PER_DAY:
            with suppress(OSError):
                file.unlink()


def touch(file: Path) -> None:
    """Say that a cached file has been used; a cache that cannot be written is no error."""
    with suppress(OSError):
        os.utime(file)


def build_once(
    folder: Path,
    build: Callable[[Path], None],
    *,
    source: Mapping[str, str],
    wait: Wait | None = None,
) -> Path:
    """Return `folder`, made by `build(temporary folder)` unless it is already complete.

    One process builds, others wait for its lock and then find the result. A crash at any moment leaves either
    nothing under the final name or the whole folder; leftovers are removed by the next build. `source` is
    recorded in the manifest. A folder that lost files or bytes is built anew.

    Raises ConfigError if the cache cannot be written (no permission, disk full), and whatever else `build` raises.
    """
    if damage(folder) is None:
        return folder
    with ExitStack() as held:
        with _writing(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(_locked(folder.parent / f"{folder.name}.lock", wait))
        if damage(folder) is not None:  # else another process finished while we waited
            _build(folder, build, source)
    return folder


def damage(folder: Path, *, hashes: bool = False) -> str | None:
    """What is wrong with a cached folder, in words, or None: manifest, presence and sizes of its files.

    `hashes=True` also compares every file's SHA-256 (reads all bytes).
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["version"] != _MANIFEST_VERSION:
            return f"{path} was written by another version"
        for name, expected in files.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != expected["size"]:
                return f"{file} is missing or has another size than when it was written"
            if hashes and file_sha256(file) != expected["sha256"]:
                return f"{file} has other bytes than when it was written"
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return f"{path} is missing or unreadable"
    return None


@contextmanager
def _locked(path: Path, wait: Wait | None) -> Iterator[None]:
    """Hold the lock file; the operating system frees it if we die, so a stale file never blocks."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=_FIRST_LOCK_TRY_SECONDS)
    except Timeout:
        if wait is not None:
            wait("waiting for another process that prepares the same files")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(folder: Path, build: Callable[[Path], None], source: Mapping[str, str]) -> None:
    """Build beside `folder` (same file system, so that the rename is atomic) and move it in. Lock held."""
    with _writing(folder.parent):
        temporary = _empty_folder_beside(folder)
    try:
        with _writing(folder.parent, only=_FULL):
            build(temporary)
        with _writing(folder.parent):
            _write_manifest(temporary, source)
            if folder.exists():
                shutil.rmtree(folder)
            temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _empty_folder_beside(folder: Path) -> Path:
    """A new folder to build in; those of builds that were killed go away. Lock held."""
    prefix = f".{folder.name}.building-"
    for leftover in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)  # nobody else builds while we hold the lock
    temporary = folder.parent / f"{prefix}{os.getpid()}"
    temporary.mkdir()  # not mkdtemp, which would make the result private in a shared cache
    return temporary


@contextmanager
def _writing(place: Path, *, only: frozenset[int] | None = None) -> Iterator[None]:
    """Around writes below `place`: what the system refuses there becomes a ConfigError that names the cure.

    `only` these error numbers: around a build, which reads elsewhere too, a full disk alone is surely the cache's.
    """
    try:
        yield
    except OSError as error:
        if only is not None and error.errno not in only:
            raise
        raise ConfigError(
            f"cannot write the cache folder {place} ({error.strerror or error}); free some space there or "
            "point the environment variable DFLASH_CACHE at a folder that can be written."
        ) from error


def _write_manifest(folder: Path, source: Mapping[str, str]) -> None:
    """Describe what lies in `folder`, after the bytes have reached the disk, and check that they read back."""
    files: dict[str, dict[str, Any]] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        files[file.relative_to(folder).as_posix()] = {"size": file.stat().st_size, "sha256": file_sha256(file)}
    manifest = {"version": _MANIFEST_VERSION, "source": dict(source), "files": files}
    with (folder / MANIFEST_FILE).open("w", encoding="utf-8") as out:
        json.dump(manifest, out, indent=2)
        out.flush()
        os.fsync(out.fileno())
    if (what := damage(folder)) is not None:
        raise CheckpointError(f"{what}; the disk did not keep what was written to it, check it and try again.")
