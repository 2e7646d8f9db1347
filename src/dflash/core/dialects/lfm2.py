"""LiquidAI's LFM2 DSpark drafts: ids inside `dflash_config`, no projector tag, heads known from their tensors only."""

from __future__ import annotations

from dflash.core.dialects.base import Checkpoint, Dialect, Lookup
from dflash.core.dialects.deepspec import dspark_fields
from dflash.core.draft_config import DraftConfig


def resolve(found: Checkpoint, lookup: Lookup) -> DraftConfig:
    """Read an LFM2 DSpark draft."""
    return DraftConfig(**dspark_fields(found, lookup, anchor=True, why="LFM2 DSpark: the anchor slot predicts"))


DIALECT = Dialect(
    name="lfm2",
    matches=lambda found: "Lfm2DSparkDraftModel" in found.architectures,
    resolve=resolve,
)
