"""The cache: a folder is there whole or not at all, whoever dies or races on the way."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash.cache import MANIFEST_FILE, SECONDS_PER_DAY, build_once, cache_root, damage, file_sha256, prune, touch
from dflash.errors import ConfigError

SOURCE = {"file": "toy.gguf", "sha256": "0" * 64}


def writer(content: bytes = b"weights") -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(content)
        (folder / "sub").mkdir()
        (folder / "sub" / "config.json").write_text("{}")

    return build


def refuse(folder: Path) -> None:
    raise AssertionError("must not build again")


def test_root_follows_the_variables_in_order() -> None:
    """A user who sets DFLASH_CACHE must not find gigabytes in the home folder."""
    assert cache_root({"DFLASH_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_root({"XDG_CACHE_HOME": "/b"}) == Path("/b/dflash")
    assert cache_root({"DFLASH_CACHE": "", "XDG_CACHE_HOME": ""}) == Path.home() / ".cache" / "dflash"
    assert "~" not in str(cache_root({"DFLASH_CACHE": "~/x"}))


def test_builds_once_and_records_checksums(tmp_path: Path) -> None:
    """The second call must find the first one's work, and the manifest must describe the bytes."""
    folder = build_once(tmp_path / "t" / "abc", writer(), source=SOURCE)
    assert build_once(folder, refuse, source=SOURCE) == folder
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    assert manifest["source"] == SOURCE
    assert set(manifest["files"]) == {"model.safetensors", "sub/config.json"}
    assert manifest["files"]["model.safetensors"] == {
        "size": 7,
        "sha256": file_sha256(folder / "model.safetensors"),
    }
    assert damage(folder, hashes=True) is None


@pytest.mark.parametrize("harm", ["truncate", "remove", "manifest", "garbage", "list", "version"])
def test_damaged_folder_is_rebuilt(tmp_path: Path, harm: str) -> None:
    """A half-copied or cleaned-up cache must heal itself instead of failing at every start."""
    folder = build_once(tmp_path / "abc", writer(), source=SOURCE)
    manifest = folder / MANIFEST_FILE
    match harm:
        case "truncate":
            (folder / "model.safetensors").write_bytes(b"wei")
        case "remove":
            (folder / "sub" / "config.json").unlink()
        case "manifest":
            manifest.unlink()
        case "garbage":
            manifest.write_text("{")
        case "list":
            manifest.write_text("[]")
        case "version":
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 0}))
    assert damage(folder) is not None
    build_once(folder, writer(b"anew"), source=SOURCE)
    assert (folder / "model.safetensors").read_bytes() == b"anew"
    assert damage(folder) is None


def test_changed_bytes_of_equal_size_are_seen_by_the_full_check(tmp_path: Path) -> None:
    """Sizes alone cannot see a flipped byte: the hashes are what the manifest keeps them for."""
    folder = build_once(tmp_path / "abc", writer(), source=SOURCE)
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert damage(folder) is None
    assert "other bytes" in (damage(folder, hashes=True) or "")


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    """An interrupted conversion must not be taken for a finished one, nor fill the disk."""

    def interrupted(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "abc", interrupted, source=SOURCE)
    assert [path.name for path in tmp_path.iterdir()] == ["abc.lock"]
    build_once(tmp_path / "abc", writer(), source=SOURCE)  # and the lock is free again


def test_leftovers_of_a_killed_build_are_removed(tmp_path: Path) -> None:
    """kill -9 skips every clean-up: the next build has to do it, and only for its own folder."""
    (tmp_path / ".abc.building-dead").mkdir()
    (tmp_path / ".abc.building-dead" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".other.building-live").mkdir()
    build_once(tmp_path / "abc", writer(), source=SOURCE)
    assert not (tmp_path / ".abc.building-dead").exists()
    assert (tmp_path / ".other.building-live").exists()


def test_concurrent_callers_build_once_and_the_second_is_told(tmp_path: Path) -> None:
    """Two commands started together must not convert twice or read a half-written folder."""
    started = threading.Event()
    builds: list[Path] = []
    told: list[str] = []
    heard = threading.Event()

    def slow(folder: Path) -> None:
        builds.append(folder)
        started.set()
        heard.wait(60)  # the other caller has to wait and is told so
        writer()(folder)

    def tell(message: str) -> None:
        told.append(message)
        heard.set()

    first = threading.Thread(target=build_once, args=(tmp_path / "abc", slow), kwargs={"source": SOURCE})
    first.start()
    started.wait()
    build_once(tmp_path / "abc", slow, source=SOURCE, wait=tell)
    first.join()
    assert len(builds) == 1
    assert len(told) == 1
    assert "another process" in told[0]
    assert damage(tmp_path / "abc") is None


def test_unwritable_cache_names_the_variable(tmp_path: Path) -> None:
    """A read-only home is common in containers: the message must say what to set."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="DFLASH_CACHE"):
        build_once(tmp_path / "file" / "abc", writer(), source=SOURCE)


def test_full_disk_names_the_variable(tmp_path: Path) -> None:
    """Half a gigabyte does not always fit."""

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match=r"No space left.*DFLASH_CACHE"):
        build_once(tmp_path / "abc", full, source=SOURCE)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "model.gguf"),
        PermissionError(13, "Permission denied", "model.gguf"),
        ConnectionResetError(104, "Connection reset by peer"),
        OSError("a library's own words"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_a_build_stay_what_they_are(tmp_path: Path, error: OSError) -> None:
    """A source that cannot be read must not send the user to free space in the cache."""

    def broken(folder: Path) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        build_once(tmp_path / "abc", broken, source=SOURCE)
    assert caught.value is error
    assert [path.name for path in tmp_path.iterdir()] == ["abc.lock"]
    build_once(tmp_path / "abc", writer(), source=SOURCE)


@pytest.mark.parametrize("call", ["mkdir", "rename", "open"])
def test_each_own_write_that_fails_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The cure must come with every write of the cache itself: making the folder, the manifest, moving it in."""

    def refused(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    def build(folder: Path) -> None:
        writer()(folder)
        if call != "mkdir":
            monkeypatch.setattr(Path, call, refused)

    if call == "mkdir":
        monkeypatch.setattr(Path, call, refused)
    with pytest.raises(ConfigError, match=r"Permission denied.*DFLASH_CACHE"):
        build_once(tmp_path / "abc", build, source=SOURCE)


NOW = 1_000_000_000.0


def unused_for(folder: Path, **days: float) -> dict[str, Path]:
    """Files by name that were used so many days before NOW."""
    files = {name: folder / name for name in days}
    for name, file in files.items():
        file.write_text("x")
        os.utime(file, (NOW, NOW - days[name] * SECONDS_PER_DAY))
    return files


def test_pruning_keeps_what_is_used(tmp_path: Path) -> None:
    """Guards against a cache that grows for ever, and against one that drops what was just written or a folder."""
    unused_for(tmp_path, a=1, b=2, c=3, d=89, e=91)
    (tmp_path / "folder").mkdir()
    prune(tmp_path, most=10, days=90, now=NOW)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c", "d", "folder"}
    prune(tmp_path, most=2, days=90, keep=tmp_path / "d", now=NOW)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "d", "folder"}


def test_touching_is_using(tmp_path: Path) -> None:
    """Guards against dropping by age of writing: what every load reads is the last to go."""
    files = unused_for(tmp_path, a=80, b=1)
    touch(files["a"])
    prune(tmp_path, most=1, days=1e9)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    touch(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_pruning_never_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a load that fails over its cache: no folder, another process that is quicker, no permission."""
    prune(tmp_path / "missing", most=1, days=1)
    unused_for(tmp_path, a=1, b=100)

    def refuse_to(_: Path) -> None:
        raise PermissionError(13, "denied")

    monkeypatch.setattr(Path, "unlink", refuse_to)
    prune(tmp_path, most=0, days=1, now=NOW)
    assert len(list(tmp_path.iterdir())) == 2
