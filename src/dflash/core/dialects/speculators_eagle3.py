"""Speculators (vllm-project/speculators) `eagle3`: the layer's keys under `transformer_layer_config`, tensors
`layers.0.*`, switches for norms at the top level.

Taps are the residuals that enter a layer, since its training data comes out of vLLM, which captures those; without a
list they are those that enter layers 2, n // 2 and n - 3 of the target (`dialects/eagle3.py`).
"""

from __future__ import annotations

from dflash.core.dialects import eagle3
from dflash.core.dialects.base import TOP, Checkpoint, Dialect, Lookup
from dflash.core.dialects.speculators import LAYERS, TRAINING_ONLY, proposal_method
from dflash.core.draft_config import DraftConfig
from dflash.core.eagle3_config import CHAIN, Eagle3Config
from dflash.errors import CheckpointError


def matches(found: Checkpoint) -> bool:
    """By the algorithm that either of two keys names."""
    return "eagle3" in (found.raw.get("speculators_model_type"), found.level("speculators_config").get("algorithm"))


def resolve(found: Checkpoint, lookup: Lookup) -> DraftConfig:
    """Read a Speculators EAGLE-3 draft."""
    stated = {found.raw.get("speculators_model_type"), found.level("speculators_config").get("algorithm")} - {None}
    if stated != {"eagle3"}:
        raise CheckpointError(f"{found.source} states the algorithms {sorted(map(str, stated))}; keep the right one.")
    inner = Lookup(found.source, ((LAYERS, found.level(LAYERS)),), lookup.origins, lookup.notes)
    values = eagle3.layer_fields(found, lookup, inner)
    if found.shapes is None:
        values["head_norms"] = found.level(LAYERS).get("model_type") == "qwen3"
    width = proposal_method(found).get("speculative_tokens")
    if not isinstance(width, int) or isinstance(width, bool):
        width = CHAIN
        lookup.decided("block_size", f"{CHAIN} steps: speculative_tokens is not stated")
    else:
        lookup.decided("block_size", f"speculative_tokens {width} plus the anchor")
    return Eagle3Config(**values, target_layer_ids=eagle3.entering(found, lookup), block_size=width + 1)


DIALECT = Dialect(
    name="speculators-eagle3",
    matches=matches,
    resolve=resolve,
    levels=lambda found: ((TOP, found.raw),),
    canonical=lambda name: None if name in TRAINING_ONLY else eagle3.canonical(name),
)
