"""From what the user wrote after --target or --draft to files on this machine.

A spec is a built-in name, a local folder, a GGUF file or a hub id ("owner/name", optionally "@revision"), tried
in this order; a folder called like a built-in name is reached as ./name. Knows where files are, not what is in
them: loads no weights, imports no model library; only a GGUF draft is translated on the way (gguf_draft.py). Only
safetensors weights are accepted or downloaded: the pickled formats (.bin, .pt) can run code when they are opened.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dflash.core.published import published_for
from dflash.errors import ConfigError, MissingExtra, ModelError
from dflash.registry import DRAFTS, MODEL_FREE_DRAFTERS, TARGETS, PackagedTarget

Progress = Callable[[str, float | None], None]
"""Told what is being done and how much of it is finished (0..1, None = unknown); called at any rate."""

Download = Callable[..., str]
"""Fetch a hub repository and return its local folder: the signature of `huggingface_hub.snapshot_download`."""

AUTO = "auto"
"""Draft spec: the draft that this package ships for the target."""

_HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?")
_DATA_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_CODE_FILES = ("*.py",)
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model's files are."""

    name: str
    """As the user named it, for reports and for looking up its draft."""
    path: Path
    """A folder with config.json and safetensors, or a GGUF file."""
    revision: str | None = None
    """Commit of a hub repository."""
    sha256: str | None = None
    """Of the GGUF file, where it is known beforehand."""

    @property
    def is_gguf(self) -> bool:
        """Whether `path` is a GGUF file, to be converted before use."""
        return self.path.suffix.lower() == ".gguf"


def log_steps(logger: logging.Logger) -> Progress:
    """A progress that logs each step once."""
    said = ""

    def report(what: str, done: float | None) -> None:
        nonlocal said
        if what != said:
            said = what
            logger.info("%s", what)

    return report


def refuse_missing(spec: str, role: str) -> None:
    """Raise what `resolve_target` and `resolve_draft` say of a path to nothing, before anybody has imported a tensor
    library for it; `role` is "target" or "draft". Names and hub ids are left to them."""
    if spec not in (TARGETS if role == "target" else (AUTO, *MODEL_FREE_DRAFTERS, *DRAFTS)):
        _local(spec, role)


def resolve_target(
    spec: str,
    *,
    allow_code: bool = False,
    progress: Progress | None = None,
    download: Download | None = None,
) -> Source:
    """Find the files of a target; `allow_code` also fetches the repository's Python files.

    Raises MissingExtra if a built-in target's package is not installed, ModelError if nothing is found or the
    folder holds no safetensors weights. `download` replaces the hub client in tests.
    """
    if (entry := TARGETS.get(spec)) is not None:
        return Source(name=spec, path=_packaged_file(spec, entry), sha256=entry.sha256)
    source = _local(spec, "target") or _from_hub(spec, "target", allow_code, progress, download)
    if not source.is_gguf:
        _check_folder(source.path, "target")
    return source


def resolve_draft(
    spec: str,
    target: Source,
    *,
    progress: Progress | None = None,
    download: Download | None = None,
) -> Source:
    """Find the files of a draft; "auto" is the one shipped for `target`, or the first one published for it.

    A GGUF file is translated into a folder once (`gguf_draft.translated_folder`).

    Raises ModelError if nothing is found or no draft is known for the target, and what the translation raises.
    """
    if spec == AUTO:
        return _automatic_draft(target, progress, download)
    if spec in DRAFTS:
        return _shipped_draft(spec)
    source = _local(spec, "draft") or _from_hub(spec, "draft", False, progress, download)
    if source.is_gguf:
        from dflash.gguf_draft import translated_folder  # parses files, and imports what it takes for that

        return Source(name=spec, path=translated_folder(source.path, progress=progress))
    _check_folder(source.path, "draft")
    return source


def _packaged_file(name: str, entry: PackagedTarget) -> Path:
    """The weights file inside an installed distribution, found through its metadata."""
    alternative = "or give any hub id or local folder of a model in its place"
    try:
        files = importlib.metadata.distribution(entry.distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtra(
            f"the weights of '{name}' come from the package {entry.distribution}, which is not installed: "
            f"run `{entry.install_command}`, {alternative}."
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if file.name == entry.file and path.is_file():
            return path
    raise MissingExtra(
        f"the installed package {entry.distribution} does not hold {entry.file}: "
        f"run `{entry.install_command} --force-reinstall`, {alternative}."
    )


def _automatic_draft(target: Source, progress: Progress | None, download: Download | None) -> Source:
    for name, entry in DRAFTS.items():
        if target.name.partition("@")[0] in entry.targets:
            return _shipped_draft(name)
    if (published := published_for(target.name)) is not None:
        source = _from_hub(published.draft, "draft", False, progress, download)
        _check_folder(source.path, "draft")
        return source
    raise ModelError(
        f"no draft is shipped for target '{target.name}', and no published one is known. Name one (a hub id or folder "
        "made for this target), train one with `dflash prepare` and `dflash train`, or decode without a draft "
        "(--no-draft, draft=None)."
    )


def _shipped_draft(name: str) -> Source:
    folder = Path(__file__).parent / DRAFTS[name].folder
    if not folder.is_dir():
        raise ModelError(
            f"the shipped draft '{name}' is missing from this installation ({folder}); reinstall dflash, "
            "or name another draft."
        )
    return Source(name=name, path=folder)


def _local(spec: str, role: str) -> Source | None:
    """An existing folder or GGUF file; None if `spec` is no path at all. A path to nothing is an error."""
    if not spec.strip():
        raise ConfigError(f"the {role} is empty; give a hub id, a local folder, a GGUF file or a built-in name.")
    path = Path(spec).expanduser()
    if path.is_dir():
        return Source(name=spec, path=path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return Source(name=spec, path=path)
        raise ModelError(f"{role} '{spec}' is a single file of an unknown kind; give its folder, or a GGUF file.")
    looks_like_path = spec.startswith((".", "/", "~")) or "\\" in spec or spec.count("/") > 1
    if (looks_like_path and "@" not in spec) or path.suffix.lower() == ".gguf" or path.is_absolute():
        raise ModelError(f"{role} '{spec}' does not exist (looked at {path.absolute()}); correct the path.")
    return None


def _from_hub(spec: str, role: str, allow_code: bool, progress: Progress | None, download: Download | None) -> Source:
    """Download (or find in the hub client's own cache) the repository that `spec` names."""
    match = _HUB_ID.fullmatch(spec)
    if match is None:
        raise ModelError(_unknown_name(spec, role))
    repo, revision = match["repo"], match["revision"]
    if download is None:
        from huggingface_hub import snapshot_download

        download = snapshot_download
    arguments: dict[str, Any] = {"tqdm_class": _reporting_tqdm(progress, repo)} if progress else {}
    with _hub_errors(spec, role):
        folder = download(
            repo,
            revision=revision,
            allow_patterns=[*_DATA_FILES, *(_CODE_FILES if allow_code else ())],
            **arguments,
        )
    path = Path(folder)
    return Source(name=spec, path=path, revision=path.name if path.parent.name == "snapshots" else revision)


@contextmanager
def _hub_errors(spec: str, role: str) -> Iterator[None]:
    """Turn the hub client's many exceptions into one that names the cure."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except GatedRepoError as error:
        raise ModelError(
            f"{role} '{spec}' is gated on the hub: accept its terms on its page and log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{role} '{spec}' was found neither as a local folder nor on the hub; check the spelling "
            "(private repositories need `hf auth login`)."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{role} '{spec}': the repository exists, but not this revision; check it.") from error
    except (OSError, ValueError, RuntimeError) as error:  # the client's network errors derive from these
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{role} '{spec}' is no local folder and could not be fetched from the hub ({reason}). "
            "Check the network, or give a local folder, a GGUF file or a built-in name "
            f"({', '.join(sorted(TARGETS if role == 'target' else DRAFTS))})."
        ) from error


def _unknown_name(spec: str, role: str) -> str:
    names: Sequence[str] = sorted(TARGETS if role == "target" else DRAFTS)
    close = get_close_matches(spec, names, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return (
        f"{role} '{spec}' is unknown.{hint} Built-in names: {', '.join(names)}. "
        "Any hub id (owner/name), local folder or GGUF file works too."
    )


def _check_folder(folder: Path, role: str) -> None:
    """A folder must hold config.json and safetensors weights."""
    gguf = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    if not (folder / "config.json").is_file():
        cure = f"give the GGUF file itself ({gguf[0]})" if gguf else "give the folder that holds it"
        raise ModelError(f"the {role} folder {folder} has no config.json; {cure}.")
    if not any(folder.glob("*.safetensors")):
        if gguf:
            raise ModelError(f"the {role} folder {folder} has no safetensors weights; give the GGUF file ({gguf[0]}).")
        if any(next(folder.glob(pattern), None) for pattern in _PICKLED):
            raise ModelError(
                f"the {role} folder {folder} has pickled weights only (.bin, .pt), which can run code when opened "
                "and are never loaded; convert them to safetensors (docs/drafts.md shows how) or choose a repository "
                "that has them."
            )
        raise ModelError(
            f"the {role} folder {folder} holds no *.safetensors weights; check the path or download it again."
        )


def _reporting_tqdm(progress: Progress, repo: str) -> type:
    """A silent progress-bar class for the hub client that reports downloaded bytes to `progress`."""
    from tqdm.auto import tqdm

    class ReportingTqdm(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # an argument of the hub client's own subclass
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})
            self.total = kwargs.get("total")
            self.done = 0.0

        def update(self, n: float | None = 1) -> None:
            self.done += n or 0
            if self._counts_bytes:
                progress(f"downloading {repo}", min(1.0, self.done / self.total) if self.total else None)

    return ReportingTqdm
