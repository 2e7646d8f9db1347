"""SpecForge's DSpark drafts: a plain config with `projector_type: dspark` and the DSpark keys inside `dflash_config`.

Their rotary embedding is built from their own config, so YaRN there is real. (Its plain DFlash drafts are z-lab's.)
"""

from __future__ import annotations

from dflash.core.dialects.base import NESTED, Checkpoint, Dialect, Lookup
from dflash.core.dialects.deepspec import dspark_fields
from dflash.core.draft_config import DraftConfig


def resolve(found: Checkpoint, lookup: Lookup) -> DraftConfig:
    """Read a SpecForge DSpark draft."""
    return DraftConfig(**dspark_fields(found, lookup, anchor=True, why="SpecForge DSpark: the anchor slot predicts"))


DIALECT = Dialect(
    name="specforge",
    matches=lambda found: found.level(NESTED).get("projector_type") == "dspark",
    resolve=resolve,
)
