"""Published drafts by their target, as far as a launcher has to know them: no network is needed to show a command.

Facts are those of the drafts' own configs and model cards (November 2026). A hub id that is not listed works too: its
config.json is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dflash.launch.drafts import SLIDING, ServedDraft

_FULL = "full_attention"
_GEMMA_WINDOWS = (SLIDING, SLIDING, SLIDING, SLIDING, _FULL)

_PAIRS: tuple[tuple[str, ServedDraft], ...] = (
    (
        "Qwen/Qwen3-4B",
        ServedDraft(
            location="z-lab/Qwen3-4B-DFlash-b16",
            block_size=16,
            layer_types=(_FULL,) * 5,
            target_layer_ids=(1, 9, 17, 25, 33),
            num_target_layers=36,
        ),
    ),
    (
        "Qwen/Qwen3-8B",
        ServedDraft(
            location="z-lab/Qwen3-8B-DFlash-b16",
            block_size=16,
            layer_types=(_FULL,) * 5,
            target_layer_ids=(1, 9, 17, 25, 33),
            num_target_layers=36,
        ),
    ),
    ("Qwen/Qwen3.5-27B", ServedDraft(location="z-lab/Qwen3.5-27B-DFlash", block_size=16)),
    (
        "openai/gpt-oss-120b",
        ServedDraft(
            location="z-lab/gpt-oss-120b-DFlash",
            block_size=10,
            layer_types=(_FULL,) * 8,
            target_layer_ids=(1, 9, 17, 25, 33),
            num_target_layers=36,
        ),
    ),
    (
        "google/gemma-4-31B-it",
        ServedDraft(
            location="z-lab/gemma-4-31B-it-DFlash",
            block_size=16,
            layer_types=_GEMMA_WINDOWS,
            target_layer_ids=(1, 12, 23, 35, 46, 57),
        ),
    ),
    (
        "moonshotai/Kimi-K2.5",
        ServedDraft(
            location="z-lab/Kimi-K2.5-DFlash",
            block_size=8,
            layer_types=(_FULL,) * 6,
            target_layer_ids=(1, 12, 24, 35, 47, 58),
            num_target_layers=61,
        ),
    ),
)

DRAFT_OF: Mapping[str, str] = MappingProxyType({target: draft.location for target, draft in _PAIRS})
"""Target hub id -> hub id of its draft."""

FACTS: Mapping[str, ServedDraft] = MappingProxyType({draft.location: draft for _, draft in _PAIRS})
"""Draft hub id -> what is known of it."""
