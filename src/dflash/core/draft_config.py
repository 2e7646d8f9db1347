"""What a draft checkpoint says about itself, read once into one frozen description.

The z-lab v1 layout is read here (flat and nested `dflash_config`). A value is looked up in `dflash_config`
first, then at the top level; if both exist and differ the file contradicts itself and is refused. Nothing
that changes the mathematics has a default: a missing tap list, mask id or rope theta is an error, since a wrong
guess loads cleanly and only costs speed. Further dialects become one reader each beside this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dflash.errors import CheckpointError, UnsupportedModel

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
ARCHITECTURE = "DFlashDraftModel"

_NESTED = "dflash_config"
_NOT_V1 = {
    "speculators_config": "a Speculators checkpoint",
    "speculators_model_type": "a Speculators checkpoint",
    "dspine_config": "a DSpine draft",
    "markov_rank": "a DSpark draft",
    "conv_kernel_size": "a DFlash 2 draft",
    "selector_rank": "a DFlash 2 draft",
    "projector_type": "a DSpark or Domino draft",
}


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The resolved description of a DFlash v1 draft network (methods: arXiv:2602.06036 §3)."""

    hidden_size: int
    """H: width of draft, target embedding and head."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    """V of the target."""
    block_size: int
    """B: slots per block, anchor slot included; a block proposes at most B - 1 tokens."""
    mask_token_id: int
    """Id whose target embedding fills the mask slots; never proposed."""
    target_layer_ids: tuple[int, ...]
    """Taps: z means the output of decoder layer z (Transformers' hidden_states[z + 1])."""
    num_target_layers: int | None = None
    """Layer count of the target, where the file states it (checked against the target)."""
    draft_vocabulary_file: str | None = None
    """Our extension: JSON list of target ids; the draft scores only these rows of the target's head. Other
    engines ignore it and use the full head with the same weights."""

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise CheckpointError(
                f"block_size is {self.block_size}: a block needs the anchor and at least one draft slot (>= 2). "
                "Correct it in the draft's config.json."
            )
        if not self.target_layer_ids:
            raise CheckpointError("target_layer_ids is empty; write the tapped layers the draft was trained with.")
        ids = self.target_layer_ids
        if any(layer < 0 for layer in ids) or any(b <= a for a, b in pairwise(ids)):
            raise CheckpointError(
                f"target_layer_ids must be increasing layer numbers from 0, not {list(ids)}; the order is baked "
                "into fc, so it has to be the one used in training."
            )
        if self.num_target_layers is not None and ids[-1] >= self.num_target_layers:
            raise CheckpointError(f"tap {ids[-1]} does not exist in a target of {self.num_target_layers} layers.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise CheckpointError(
                f"mask_token_id {self.mask_token_id} lies outside the vocabulary of {self.vocab_size} tokens."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError("num_attention_heads must be a multiple of num_key_value_heads.")

    @property
    def fc_in_features(self) -> int:
        """Width of the concatenated taps of one token."""
        return len(self.target_layer_ids) * self.hidden_size

    def to_json(self) -> dict[str, Any]:
        """The config.json of the z-lab v1 layout (readable by other engines)."""
        nested: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        if self.draft_vocabulary_file is not None:
            nested["draft_vocabulary_file"] = self.draft_vocabulary_file
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "block_size": self.block_size,
            _NESTED: nested,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "vocab_size": self.vocab_size,
            "num_target_layers": self.num_target_layers,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "max_position_embeddings": 32768,
            "dtype": "bfloat16",
        }


def read_draft_config(folder: Path) -> DraftConfig:
    """Read `config.json` of a draft folder.

    Raises CheckpointError for missing, unreadable or contradictory values and UnsupportedModel for drafts of
    another kind; the message names the key.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_FILE}, so it is not a draft; give the draft's own folder.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download or export the draft again.") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object; download or export the draft again.")
    return parse_draft_config(raw, source=str(path))


def parse_draft_config(raw: Mapping[str, Any], *, source: str) -> DraftConfig:
    """Resolve a parsed config.json; `source` names the file in messages. Errors as `read_draft_config`."""
    _refuse_other_kinds(raw, source)
    lookup = _Lookup(raw, source)
    return DraftConfig(
        hidden_size=lookup.integer("hidden_size"),
        num_hidden_layers=lookup.integer("num_hidden_layers"),
        num_attention_heads=lookup.integer("num_attention_heads"),
        num_key_value_heads=lookup.integer("num_key_value_heads"),
        head_dim=lookup.integer("head_dim"),
        intermediate_size=lookup.integer("intermediate_size"),
        rms_norm_eps=float(lookup.required("rms_norm_eps")),
        rope_theta=_rope_theta(raw, source),
        vocab_size=lookup.integer("vocab_size"),
        block_size=lookup.integer("block_size"),
        mask_token_id=lookup.integer("mask_token_id"),
        target_layer_ids=lookup.integers("target_layer_ids"),
        num_target_layers=lookup.optional_integer("num_target_layers"),
        draft_vocabulary_file=lookup.optional_text("draft_vocabulary_file"),
    )


def read_draft_vocabulary(folder: Path, config: DraftConfig) -> tuple[int, ...] | None:
    """Target ids that the draft scores, ascending, or None for all.

    Raises CheckpointError unless the file that the config names lists increasing ids of the target.
    """
    if config.draft_vocabulary_file is None:
        return None
    path = folder / config.draft_vocabulary_file
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the draft vocabulary {path} ({error}); export the draft again.") from error
    good = isinstance(ids, list) and bool(ids) and all(type(i) is int and 0 <= i < config.vocab_size for i in ids)
    if not good or any(b <= a for a, b in pairwise(ids)):
        raise CheckpointError(
            f"{path} must list increasing token ids below {config.vocab_size}; export the draft again."
        )
    return tuple(ids)


def _refuse_other_kinds(raw: Mapping[str, Any], source: str) -> None:
    nested = raw.get(_NESTED)
    for key, kind in _NOT_V1.items():
        if raw.get(key) or (isinstance(nested, Mapping) and nested.get(key)):
            raise UnsupportedModel(f"{source} has '{key}': {kind}. This version runs DFlash v1 drafts only.")
    if raw.get("attention_bias"):
        raise UnsupportedModel(f"{source} has attention_bias; this version runs v1 drafts without biases only.")
    if raw.get("is_causal") or (isinstance(nested, Mapping) and nested.get("causal")):
        raise UnsupportedModel(f"{source} asks for a causal block; this version runs bidirectional blocks only.")
    for key in ("input_embedding_scale", "output_multiplier"):
        for level in (raw, nested if isinstance(nested, Mapping) else {}):
            if level.get(key, 1.0) != 1.0:
                raise UnsupportedModel(f"{source} sets {key}, which this version does not apply.")
    for level in (raw, nested if isinstance(nested, Mapping) else {}):
        if (level.get("final_logit_softcapping") or 0) > 0:
            raise UnsupportedModel(f"{source} sets final_logit_softcapping, which this version does not apply.")
    layer_types = raw.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types) or raw.get("use_sliding_window"):
        raise UnsupportedModel(f"{source} has sliding-window layers; this version runs full-attention drafts only.")


def _rope_theta(raw: Mapping[str, Any], source: str) -> float:
    parameters = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise UnsupportedModel(f"{source} scales its rotary embedding ({kind}); this version runs plain rotary only.")
    found = {float(v) for v in (parameters.get("rope_theta"), raw.get("rope_theta")) if v is not None}
    if not found:
        raise CheckpointError(
            f"{source} has no rope_theta; there is no safe default (1e4, 1e6 and 1e7 are all in use). "
            "Add the value the draft was trained with, usually the target's."
        )
    if len(found) > 1:
        raise CheckpointError(f"{source} states different rope_theta values {sorted(found)}; keep the right one.")
    return found.pop()


@dataclass(frozen=True)
class _Lookup:
    """Look a key up in `dflash_config`, then at the top level; both and different is an error."""

    raw: Mapping[str, Any]
    source: str

    def find(self, key: str) -> Any:
        nested = self.raw.get(_NESTED)
        inner = nested.get(key) if isinstance(nested, Mapping) else None
        outer = self.raw.get(key)
        if inner is not None and outer is not None and inner != outer:
            raise CheckpointError(
                f"{self.source} states {key} twice and differently ({inner} in {_NESTED}, {outer} at the top level); "
                "keep the value the draft was trained with."
            )
        return outer if inner is None else inner

    def required(self, key: str) -> Any:
        value = self.find(key)
        if value is None:
            raise CheckpointError(
                f"{self.source} has no '{key}'. It is never guessed, since a wrong value only shows as lost speed; "
                "add the value the draft was trained with."
            )
        return value

    def integer(self, key: str) -> int:
        value = self.required(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.source}: {key} must be an integer, not {value!r}.")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.required(key)
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise CheckpointError(f"{self.source}: {key} must be a list of integers, not {value!r}.")
        return tuple(value)

    def optional_integer(self, key: str) -> int | None:
        return None if self.find(key) is None else self.integer(key)

    def optional_text(self, key: str) -> str | None:
        value = self.find(key)
        if value is not None and (not isinstance(value, str) or Path(value).name != value):
            raise CheckpointError(f"{self.source}: {key} must be a plain file name, not {value!r}.")
        return value
