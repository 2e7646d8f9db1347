"""Training checkpoints: weights, optimizer moments and data position, whole or not at all.

A checkpoint is a folder written under a temporary name and renamed, so that kill -9 at any moment leaves the previous
one. All random draws of a run are keyed by (seed, visit number), hence the visit number is its whole random state.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash.errors import CheckpointError
from dflash.prepare.jsonl import sync_folder

_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands."""

    step: int
    """Optimizer steps done."""
    visit: int
    """Sequences seen, over all epochs: fixes order and anchors of everything that follows."""
    seconds: float
    """Training time so far, over all restarts."""
    recipe: str
    """Fingerprint of what may not change between restarts."""


def save_checkpoint(folder: Path, network: nn.Module, optimizer: torch.optim.Optimizer, position: Position) -> Path:
    """Write `folder`/step-NNNNNNNN and drop all but the newest two."""
    final = folder / f"step-{position.step:08d}"
    for stale in folder.glob(".step-*"):  # what a killed process was writing
        shutil.rmtree(stale, ignore_errors=True)
    partial = folder / f".{final.name}.{os.getpid()}"
    partial.mkdir(parents=True)
    save_file({k: v.detach().cpu().contiguous() for k, v in network.state_dict().items()}, partial / _MODEL)
    save_file(_moments(network, optimizer), partial / _OPTIMIZER)
    (partial / _STATE).write_text(json.dumps(vars(position)), encoding="utf-8")
    for file in partial.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    sync_folder(folder)
    for old in _complete(folder)[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_checkpoint(folder: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> Position | None:
    """Restore the newest checkpoint in `folder`; None if there is none.

    Raises CheckpointError if it is damaged or of another network.
    """
    found = _complete(folder)
    if not found:
        return None
    newest = found[-1]
    try:
        position = Position(**json.loads((newest / _STATE).read_text(encoding="utf-8")))
        network.load_state_dict(load_file(newest / _MODEL), strict=True)
        _restore(network, optimizer, load_file(newest / _OPTIMIZER))
        return position
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint {newest} cannot be resumed ({str(error).splitlines()[0]}); delete that folder to go on "
            "from the one before it."
        ) from error


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / _STATE).is_file())


def _moments(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state as flat tensors named <parameter>/<moment>."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = torch.as_tensor(value).detach().cpu().contiguous().clone()
    return tensors


def _restore(network: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(network.named_parameters())
    on_device = {id(p) for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition("/")
        parameter = parameters[name]
        if value.ndim and value.shape != parameter.shape:
            raise ValueError(f"{full_name} has shape {list(value.shape)}, not {list(parameter.shape)}")
        # As torch.optim keeps them: moments follow their parameter, step counts stay on the CPU unless fused.
        moves = value.ndim > 0 or id(parameter) in on_device
        optimizer.state[parameter][key] = value.to(parameter.device) if moves else value
    if without := sorted(parameters.keys() - {name.rpartition("/")[0] for name in tensors}):
        raise ValueError(f"it has no optimizer state of {without[0]}")
