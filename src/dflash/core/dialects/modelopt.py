"""NVIDIA ModelOpt's DSpark drafts: `projector_type: dspark` like SpecForge's, but head tensors without a prefix.

The anchor slot predicts only if `shift_label` says so. (ModelOpt's plain DFlash drafts are z-lab's layout.)
"""

from __future__ import annotations

from dflash.core.dialects.base import NESTED, Checkpoint, Dialect, Lookup
from dflash.core.dialects.deepspec import dspark_fields
from dflash.core.draft_config import DraftConfig

_PREFIXES = {
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "gate_proj.": "markov_head.gate_proj.",
    "joint_proj.": "markov_head.joint_proj.",
    "confidence_proj.": "confidence_head.proj.",
}


def matches(found: Checkpoint) -> bool:
    """By its bare tensor names; without weights at hand, by a key that only it writes."""
    nested = found.level(NESTED)
    if nested.get("projector_type") != "dspark":
        return False
    if found.shapes is None:
        return "use_confidence_head" in nested or "use_confidence_head" in found.raw
    return any(name.startswith(("markov_w1.", "confidence_proj.")) for name in found.shapes)


def resolve(found: Checkpoint, lookup: Lookup) -> DraftConfig:
    """Read a ModelOpt DSpark draft."""
    why = "ModelOpt: the anchor slot does not predict without shift_label"
    return DraftConfig(**dspark_fields(found, lookup, anchor=False, why=why))


def canonical(name: str) -> str:
    """Put the heads' prefix before their bare names."""
    for bare, full in _PREFIXES.items():
        if name.startswith(bare):
            return full + name.removeprefix(bare)
    return name


DIALECT = Dialect(name="modelopt", matches=matches, resolve=resolve, canonical=canonical)
