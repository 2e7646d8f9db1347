"""DeepSpec's own layout (deepseek-ai `dspark_*` and `dflash_*_block7`): keys at the top level, own embedding and head.

`markov_rank` 0 without a confidence head is plain DFlash, except that the anchor slot predicts.
"""

from __future__ import annotations

from typing import Any

from dflash.core.dialects import fields
from dflash.core.dialects.base import Checkpoint, Dialect, Lookup
from dflash.core.draft_config import DraftConfig

ARCHITECTURE = "Qwen3DSparkModel"


def resolve(found: Checkpoint, lookup: Lookup) -> DraftConfig:
    """Read a DeepSpec draft."""
    why = "DeepSpec: the anchor slot predicts"
    return DraftConfig(**dspark_fields(found, lookup, anchor=True, why=why, scaling=False))


def dspark_fields(
    found: Checkpoint,
    lookup: Lookup,
    *,
    anchor: bool,
    why: str,
    scaling: bool = True,
    window_everywhere: bool = False,
) -> dict[str, Any]:
    """What DSpark's packagings without a reduced vocabulary share.

    They differ in the anchor's layout where no key says it (`anchor`, and `why`), in whether rotary scaling is theirs
    or a copy of the target's, and in where a window applies.
    """
    fields.refuse_other_mathematics(found, lookup)
    fields.full_vocabulary(lookup)
    sizes = fields.geometry(lookup)
    return {
        **sizes,
        **fields.block(lookup),
        **fields.rope(lookup, scaling=scaling),
        **fields.attention(found, lookup, window_everywhere=window_everywhere),
        **fields.scales(lookup),
        **fields.own_embedding_and_head(found, lookup),
        **fields.markov(found, lookup, sizes["hidden_size"]),
        "target_layer_ids": fields.taps(lookup, embedding_is=-1),
        "anchor_predicts": fields.anchor_predicts(lookup, anchor, why),
    }


DIALECT = Dialect(
    name="deepspec",
    matches=lambda found: ARCHITECTURE in found.architectures and "markov_rank" in found.raw,
    resolve=resolve,
)
