"""From a checked draft folder to a network: tensors are read, cast, and tested for NaN and infinity.

The description and the check of names and shapes are `core/draft_reader.py`'s; here weights first enter memory.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from dflash.backends.mlx.draft_model import DraftModel
from dflash.backends.mlx.eagle3_model import Eagle3Model
from dflash.core.draft_reader import DraftDescription, read_draft
from dflash.core.eagle3_config import Eagle3Config
from dflash.errors import CheckpointError, UnsupportedModel


def load_draft(folder: Path, dtype: mx.Dtype) -> DraftModel:
    """Read a block draft's folder of any dialect into a network ready for inference.

    Every expected tensor must be there with its shape and finite numbers, and no other: a draft with a hole would
    still give correct text, only slowly. Raises CheckpointError (also for weights that overflow `dtype`) or
    UnsupportedModel.
    """
    network = load_described(read_draft(folder), dtype)
    if not isinstance(network, DraftModel):
        raise UnsupportedModel(f"{folder} is an EAGLE-3 draft, which has no block; use a draft of blocks here.")
    return network


def load_described(draft: DraftDescription, dtype: mx.Dtype) -> DraftModel | Eagle3Model:
    """As `load_draft`, for a folder that has been read already, and for EAGLE-3 drafts too."""
    config = draft.config
    network = Eagle3Model(config) if isinstance(config, Eagle3Config) else DraftModel(config)
    network.vocabulary = draft.vocabulary
    network.load_weights(list(read_tensors(draft, dtype).items()), strict=True)
    network.eval()
    return network


def read_tensors(draft: DraftDescription, dtype: mx.Dtype) -> dict[str, mx.array]:
    """All tensors by this project's names. Raises CheckpointError for numbers not finite, as stored or cast."""
    tensors: dict[str, mx.array] = {}
    for file in sorted({stored.file for stored in draft.tensors.values()}):
        try:
            opened = mx.load(str(file))
            assert isinstance(opened, dict)
            for name, stored in draft.tensors.items():
                if stored.file == file:
                    tensors[name] = _checked(opened[draft.stored_names[name]], dtype, f"{file}: {name}")
        except RuntimeError as error:
            raise CheckpointError(f"{file} is damaged ({error}); download or export the draft again.") from error
    return tensors


def _checked(value: mx.array, dtype: mx.Dtype, what: str) -> mx.array:
    cast = value.astype(dtype)
    if not bool(mx.isfinite(cast).all()):
        form = "" if not bool(mx.isfinite(value).all()) else f" as {str(dtype).removeprefix('mlx.core.')}"
        raise CheckpointError(f"{what}{form} holds NaN or infinity; the draft is unusable, export it again.")
    return cast
