"""NVIDIA's Nemotron 3.5 drafts: causal window with sinks, own embedding, the target's head, anchor only.

They state a window without saying which layers slide: it is on all of them. Ids come in both conventions, which must
agree.
"""

from __future__ import annotations

from dflash.core.dialects.base import Checkpoint, Dialect, Lookup
from dflash.core.dialects.deepspec import dspark_fields
from dflash.core.draft_config import DraftConfig

_SIGNS = ("dflash_query_causal", "attention_sink_bias", "has_lm_head", "sample_from_anchor")


def resolve(found: Checkpoint, lookup: Lookup) -> DraftConfig:
    """Read a Nemotron DFlash or DSpark draft."""
    everywhere = found.raw.get("sliding_window") is not None and found.raw.get("layer_types") is None
    why = "Nemotron: the anchor slot does not predict"
    return DraftConfig(**dspark_fields(found, lookup, anchor=False, why=why, window_everywhere=everywhere))


DIALECT = Dialect(
    name="nemotron",
    # Two of its signs: single ones appear in other layouts as well.
    matches=lambda found: sum(key in found.raw for key in _SIGNS) >= 2 and "dflash_query_causal" in found.raw,
    resolve=resolve,
)
