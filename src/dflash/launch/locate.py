"""From what the user wrote to what an engine can be given: hub ids stay hub ids, everything else becomes a folder.

A serving engine reads safetensors folders and hub repositories; a GGUF target is handed over as its converted copy in
the cache. Nothing is downloaded here except, for a draft that is not in the table of published ones, its config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash.core.published import published_for
from dflash.errors import CheckpointError, ModelError
from dflash.launch.drafts import ServedDraft, draft_by_config, draft_in_folder
from dflash.launch.plan import ServedTarget
from dflash.launch.published import known_draft
from dflash.registry import DRAFTS, TARGETS
from dflash.resolve import AUTO, Progress, Source, resolve_draft, resolve_target

FetchConfig = Callable[[str, str | None], Mapping[str, Any]]
"""(hub id, revision) -> the repository's parsed config.json."""

ConvertTarget = Callable[[Source, Progress | None], Path]
"""A GGUF target -> its safetensors folder."""

CONFIG_FILE = "config.json"
_HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?")


def served_target(spec: str, *, progress: Progress | None = None, convert: ConvertTarget | None = None) -> ServedTarget:
    """The target as an engine is given it. Raises what `resolve_target` raises; the conversion of a GGUF file is its
    slow part (once, about half a minute)."""
    hub = _hub_id(spec)
    if hub is not None:
        repo, revision = hub
        return ServedTarget(location=repo, name=repo, revision=revision)
    source = resolve_target(spec)
    folder = (convert or _converted)(source, progress) if source.is_gguf else source.path
    facts = _text_config(_read_config(folder))
    return ServedTarget(
        location=str(folder.absolute()),
        name=source.name if source.name in TARGETS else folder.name if not source.is_gguf else source.path.stem,
        architecture=next(iter(facts.get("architectures") or []), None),
        num_layers=facts.get("num_hidden_layers"),
        vocab_size=facts.get("vocab_size"),
        hidden_size=facts.get("hidden_size"),
    )


def served_draft(spec: str, target: ServedTarget, *, fetch: FetchConfig | None = None) -> ServedDraft:
    """The draft as an engine is given it; "auto" is the shipped or published one of the target.

    Raises ModelError if there is none or its config cannot be had, CheckpointError if that says too little.
    """
    if spec == AUTO and (published := published_for(target.name)) is not None:
        spec = published.draft
    hub = _hub_id(spec) if spec != AUTO else None
    if hub is not None:
        repo, revision = hub
        if (known := known_draft(repo)) is not None:
            return known.at(repo, revision)
        return draft_by_config((fetch or _fetch_config)(repo, revision), repo, revision)
    source = resolve_draft(spec, Source(name=target.name, path=Path(target.location)))
    return draft_in_folder(source.path)


def pair_problems(draft: ServedDraft, target: ServedTarget) -> list[str]:
    """Why the draft was made for another target, as far as the configs at hand tell."""
    pairs = (
        ("vocabulary size", draft.vocab_size, target.vocab_size),
        ("hidden size", draft.hidden_size, target.hidden_size),
        ("number of target layers", draft.num_target_layers, target.num_layers),
    )
    found = [f"{what} {a} (the target has {b})" for what, a, b in pairs if a is not None and b is not None and a != b]
    taps = draft.target_layer_ids
    if taps and target.num_layers is not None and taps[-1] >= target.num_layers:
        found.append(f"tap {taps[-1]} (the target has layers 0 to {target.num_layers - 1})")
    if not found:
        return []
    return [f"the draft was made for another target: {', '.join(found)}; use this target's draft, or train one"]


def _hub_id(spec: str) -> tuple[str, str | None] | None:
    """(repository, revision) if `spec` is a hub id and nothing on this machine."""
    if spec in TARGETS or spec in DRAFTS or Path(spec).expanduser().exists():
        return None
    match = _HUB_ID.fullmatch(spec)
    return (match["repo"], match["revision"]) if match is not None else None


def _converted(source: Source, progress: Progress | None) -> Path:
    from dflash.backends.torch.gguf import converted_folder

    return converted_folder(source, progress=progress)


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download or export the model again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object; download or export the model again.")
    return config


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A multimodal model's text part, with the architecture of the whole."""
    inner = config.get("text_config")
    return {**inner, "architectures": config.get("architectures")} if isinstance(inner, dict) else config


def _fetch_config(repo: str, revision: str | None) -> Mapping[str, Any]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        path = Path(hf_hub_download(repo, CONFIG_FILE, revision=revision))
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(
            f"the config.json of draft '{repo}' could not be fetched ({first}); check the spelling and the network "
            "(private repositories need `hf auth login`), or give the draft's folder."
        ) from error
    return _read_config(path.parent)
