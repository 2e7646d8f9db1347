"""From a checked draft folder to a network: tensors are read one by one, cast, and tested for NaN and infinity.

The description and the check of names and shapes are `core/draft_reader.py`'s; here weights first enter memory.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.eagle3_model import Eagle3Model
from dflash.backends.torch.loading import fits_memory
from dflash.core.draft_reader import DraftDescription, read_draft
from dflash.core.eagle3_config import Eagle3Config
from dflash.errors import CheckpointError, UnsupportedModel


def load_draft(folder: Path, device: torch.device, dtype: torch.dtype) -> DraftModel:
    """Read a block draft's folder of any dialect into a network ready for inference.

    Every expected tensor must be there with its shape and finite numbers, and no other: a draft with a hole would
    still give correct text, only slowly. Raises CheckpointError (also for weights that overflow `dtype`),
    UnsupportedModel, or ConfigError if it does not fit into the device's memory.
    """
    network = load_described(read_draft(folder), device, dtype, name=str(folder))
    if not isinstance(network, DraftModel):
        raise UnsupportedModel(f"{folder} is an EAGLE-3 draft, which has no block; use a draft of blocks here.")
    return network


def load_described(
    draft: DraftDescription, device: torch.device, dtype: torch.dtype, *, name: str
) -> DraftModel | Eagle3Model:
    """As `load_draft`, for a folder that has been read already, and for EAGLE-3 drafts too; `name` is for messages."""
    with torch.device("meta"):
        config = draft.config
        network = Eagle3Model(config) if isinstance(config, Eagle3Config) else DraftModel(config)
    network.vocabulary = draft.vocabulary
    with fits_memory(f"draft {name}", dtype, device):
        tensors = read_tensors(draft, device, dtype)
    network.load_state_dict(tensors, strict=True, assign=True)
    return network.eval().requires_grad_(False)


def read_tensors(draft: DraftDescription, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors by this project's names. Raises CheckpointError for numbers not finite, as stored or cast."""
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name, stored in draft.tensors.items():
        by_file[stored.file].append(name)
    tensors: dict[str, Tensor] = {}
    for file, names in by_file.items():
        try:
            with safe_open(file, framework="pt") as opened:
                for name in names:
                    value = opened.get_tensor(draft.stored_names[name])
                    _require_finite(value, f"{file}: {name}")
                    # A tensor that already has the right type still lies in the mapped file, which may change.
                    tensors[name] = value.to(device=device, dtype=dtype, copy=True)
                    _require_finite(tensors[name], f"{file} as {dtype}: {name}")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged ({error}); download or export the draft again.") from error
    return tensors


def _require_finite(value: Tensor, what: str) -> None:
    # The largest absolute value is infinite or NaN if any is; unlike isfinite() this makes no copies of the tensor.
    low, high = torch.aminmax(value) if value.numel() else (value, value)
    if value.numel() and not (bool(low.isfinite()) and bool(high.isfinite())):
        raise CheckpointError(f"{what} holds NaN or infinity; the draft is unusable, export it again.")
