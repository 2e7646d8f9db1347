"""Drafts that are recognised and not run: each with the reason, so that nobody debugs a silent loss of speed."""

from __future__ import annotations

from dflash.core.dialects.base import NESTED, Checkpoint, Dialect, Lookup
from dflash.core.draft_config import DraftConfig
from dflash.core.language_model import is_language_model
from dflash.errors import UnsupportedModel


def reason(found: Checkpoint) -> str | None:
    """Why a checkpoint is not run; None for one that no sign here speaks against."""
    if _is_old_eagle(found):
        return (
            "an EAGLE-1 or EAGLE-2 draft, which predicts the target's last hidden state; this version runs EAGLE-3 "
            "drafts, whose first layer reads an embedding and a hidden state side by side"
        )
    if is_language_model(found.raw):
        return (
            "a language model of its own, which drafts where text is generated (`dflash generate`, `chat`, `bench`, "
            "`calibrate`, `audit`) and has nothing of a draft that could be checked, converted or served"
        )
    nested = found.level(NESTED)
    projector = nested.get("projector_type") or found.raw.get("projector_type")
    if found.raw.get("dspine_config") or any(name.startswith("injection.") for name in found.shapes or ()):
        return "a DSpine draft, whose injections between the layers this version does not have"
    if projector == "domino":
        return "a Domino draft, whose recurrent correction head this version does not have"
    if projector not in (None, "dspark", "dflash"):
        return f"a draft with projector_type {projector!r}, which is of no known kind"
    if any(key.startswith("dspark_") for key in found.raw):
        return "a target model with a DSpark draft embedded (dspark_* keys), not a draft of its own"
    if found.has_tensor("self_attn.qkv_proj.weight", "self_attn.g_proj.weight") or any(
        "aux_hidden_norms" in name for name in found.shapes or ()
    ):
        return "a Laguna draft (fused or gated attention, norms per tap), whose layers this version does not have"
    other_layers = {"Gemma4DSparkModel": "Gemma 4's layers", "Qwen35DSparkModel": "gated queries and offset norms"}
    for name, what in other_layers.items():
        if name in found.architectures:
            return f"a draft of class {name}, built of {what}, which this version does not have"
    if any("eagle" in name.lower() for name in found.architectures):
        return "an EAGLE draft of another kind than EAGLE-3"
    return None


def _is_old_eagle(found: Checkpoint) -> bool:
    """By its tensors: `fc` halves an embedding and a hidden state side by side, behind it stand ordinary layers."""
    shape = (found.shapes or {}).get("fc.weight")
    halves = shape is not None and len(shape) == 2 and shape[1] == 2 * shape[0]
    return halves and is_language_model(found.raw)


def resolve(found: Checkpoint, lookup: Lookup) -> DraftConfig:
    """Raise UnsupportedModel with the reason."""
    raise UnsupportedModel(f"{lookup.source} is {reason(found)}. Use another draft of the same target.")


DIALECT = Dialect(name="refused", matches=lambda found: reason(found) is not None, resolve=resolve)
