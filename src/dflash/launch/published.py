"""Published drafts as far as a launcher has to know them, so that no network is needed to show a command.

Which draft belongs to which target is `core/published.py`'s; here is only what engines ask beyond that: the kinds of
layers, from the drafts' own configs (November 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dflash.core.published import PublishedDraft, published_as
from dflash.launch.drafts import FULL, SLIDING, ServedDraft

LAYERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "z-lab/Qwen3.6-27B-DFlash": (SLIDING, SLIDING, SLIDING, SLIDING, FULL),
        "z-lab/Qwen3.8-27B-DFlash2": (SLIDING,) * 5,
        "z-lab/gemma-4-31B-it-DFlash": (SLIDING, SLIDING, SLIDING, SLIDING, FULL),
    }
)
"""Draft hub id -> its layers, where not all of them are full."""


def known_draft(repository: str) -> ServedDraft | None:
    """What is known of a published draft; None if its config has to be read."""
    entry = published_as(repository)
    return None if entry is None or entry.block_size is None else _served(entry, entry.block_size)


def _served(entry: PublishedDraft, block_size: int) -> ServedDraft:
    return ServedDraft(
        location=entry.draft,
        kind="dspark" if entry.anchor_predicts else entry.kind,
        block_size=block_size,
        anchor_predicts=entry.anchor_predicts,
        layer_types=LAYERS.get(entry.draft),
        target_layer_ids=entry.target_layer_ids,
    )
