"""Write a trained network as a z-lab v1 draft folder, with what is needed to make it again."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from dflash.backends.torch.draft_model import DraftModel
from dflash.core.draft_config import CONFIG_FILE, WEIGHTS_FILE
from dflash.prepare.jsonl import write_atomically, write_json_atomically
from dflash.train.config import TrainConfig
from dflash.train.data import SPLIT

logger = logging.getLogger(__name__)

_FOLDERS = re.compile(r"(?<![\w.~:/-])(?:/[^/\s,\[\]=]+)+/(?=[^/\s,\[\]=])")

RECIPE_FILE, PROVENANCE_FILE = "recipe.yaml", "provenance.json"


def export_draft(network: DraftModel, folder: Path, config: TrainConfig, facts: dict[str, object]) -> None:
    """Write config.json, bf16 weights, the draft vocabulary, the resolved recipe and the provenance.

    Over an earlier export of the run too: each file is whole at any moment, and the provenance goes first and comes
    last, so that a process that is killed in between leaves a draft without one and never with a wrong one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PROVENANCE_FILE).unlink(missing_ok=True)
    tensors = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in network.state_dict().items()}
    partial = folder / f".{WEIGHTS_FILE}.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    partial.replace(folder / WEIGHTS_FILE)
    if network.config.draft_vocabulary_file is not None:
        assert network.vocabulary is not None
        write_json_atomically(folder / network.config.draft_vocabulary_file, list(network.vocabulary))
    write_json_atomically(folder / CONFIG_FILE, network.config.to_json())
    write_recipe(folder / RECIPE_FILE, config, portable=True)
    write_json_atomically(folder / PROVENANCE_FILE, provenance() | facts)


def check_split(draft: Path, split_seed: int) -> None:
    """Warn if the draft in `draft`, from which a run goes on, may have learnt what that run holds out."""
    try:
        data = json.loads((draft / PROVENANCE_FILE).read_text(encoding="utf-8"))["data"]
        split, seed = data.get("split"), data.get("split_seed")
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        split = seed = None
    if (split, seed) != (SPLIT, split_seed):
        logger.warning(
            "the draft of init does not say that it was trained on this split (%s, data.split_seed %d): it may have "
            "learnt prompts that this run holds out, whose figures then flatter it",
            SPLIT,
            split_seed,
        )


def write_recipe(path: Path, config: TrainConfig, *, portable: bool = False) -> None:
    """The resolved recipe as YAML; `portable` keeps only the last part of absolute paths, for a draft that is
    published."""
    values = json.loads(config.model_dump_json())
    text = yaml.safe_dump(_portable(values) if portable else values, sort_keys=False)
    write_atomically(path, text.encode())


def provenance() -> dict[str, object]:
    """Command and versions of this run; of absolute paths only the last part is kept."""
    packages = ("dflash", "torch", "transformers", "safetensors", "numpy")
    versions: dict[str, str] = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    command = [Path(sys.argv[0]).name, *(_shortened(word) for word in sys.argv[1:])]
    return {
        "command": command,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": versions,
    }


def _portable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _portable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_portable(inner) for inner in value]
    return _shortened(value) if isinstance(value, str) else value


def _shortened(text: str) -> str:
    """Absolute paths inside `text` cut to their last part: where a machine keeps its files is nobody's business."""
    return _FOLDERS.sub("", text)
