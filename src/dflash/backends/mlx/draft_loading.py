"""From a checked draft folder to a network: tensors are read, cast, and tested for NaN and infinity.

The description and the check of names and shapes are `core/draft_reader.py`'s; here weights first enter memory.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from dflash.backends.mlx.draft_model import DraftModel
from dflash.core.draft_reader import DraftDescription, read_draft
from dflash.errors import CheckpointError


def load_draft(folder: Path, dtype: mx.Dtype) -> DraftModel:
    """Read a draft folder of any dialect into a network ready for inference.

    Every expected tensor must be there with its shape and finite numbers, and no other: a draft with a hole would
    still give correct text, only slowly. Raises CheckpointError (also for weights that overflow `dtype`) or
    UnsupportedModel.
    """
    return load_described(read_draft(folder), dtype)


def load_described(draft: DraftDescription, dtype: mx.Dtype) -> DraftModel:
    """As `load_draft`, for a folder that has been read already."""
    network = DraftModel(draft.config)
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
