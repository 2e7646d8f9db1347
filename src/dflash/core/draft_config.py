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
_NOT_V1: Mapping[str, str] = {
    "speculators_config": "a Speculators checkpoint",
    "speculators_model_type": "a Speculators checkpoint",
    "dspine_config": "a DSpine draft",
    "markov_rank": "a DSpark draft",
    "conv_kernel_size": "a DFlash 2 draft",
    "selector_rank": "a DFlash 2 draft",
    "projector_type": "a DSpark or Domino draft",
}

_SWITCHES: Mapping[str, tuple[tuple[object, ...], str]] = {
    "attention_bias": ((None, False), "biases in its attention"),
    "is_causal": ((None, False), "a causal block"),
    "causal": ((None, False), "a causal block"),
    "dflash_query_causal": ((None, False), "a causal block"),
    "sample_from_anchor": ((None, False), "an anchor slot that predicts"),
    "shift_label": ((None, False), "an anchor slot that predicts"),
    "logits_start": ((None, 1), "an anchor slot that predicts"),
    "use_sliding_window": ((None, False), "sliding-window layers"),
    "use_swa": ((None, False), "sliding-window layers"),
    "input_embedding_scale": ((None, 1), "scaled input embeddings"),
    "output_multiplier": ((None, 1), "scaled logits"),
    "attention_sink_bias": ((None, False), "attention sinks"),
    "add_swa_attention_sink_bias": ((None, False), "attention sinks"),
    "attention_value_scale": ((None, 1), "scaled attention values"),
    "log_snr_conditioning": ((None, False), "noise-level embeddings"),
    "rope_is_neox_style": ((None, True), "interleaved rotary embedding"),
    "is_neox_style": ((None, True), "interleaved rotary embedding"),
    "hidden_act": ((None, "silu"), "another activation than silu"),
}
"""Keys that change the mathematics: the values under which this version's network is the right one, and what any other
value asks for. They count at both levels (formats differ in where they put them)."""


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The resolved description of a DFlash v1 draft network (arXiv:2602.06036 §3)."""

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
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
            self._require_positive(name)
        for name in ("intermediate_size", "vocab_size", "rms_norm_eps", "rope_theta"):
            self._require_positive(name)
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim is {self.head_dim}: rotary embedding turns pairs, so it must be even.")
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
            raise CheckpointError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}; correct the draft's config.json."
            )

    def _require_positive(self, name: str) -> None:
        value: float = getattr(self, name)
        if not 0 < value < float("inf"):
            raise CheckpointError(f"{name} must be positive, not {value}; correct the draft's config.json.")

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
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download or export the draft again.") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object; download or export the draft again.")
    return parse_draft_config(raw, source=str(path))


def parse_draft_config(raw: Mapping[str, Any], *, source: str) -> DraftConfig:
    """Resolve a parsed config.json; `source` names the file in messages. Errors as `read_draft_config`."""
    lookup = _Lookup(raw, source)
    _refuse_other_kinds(raw, source)
    _check_restated(lookup)
    return DraftConfig(
        hidden_size=lookup.integer("hidden_size"),
        num_hidden_layers=lookup.integer("num_hidden_layers"),
        num_attention_heads=lookup.integer("num_attention_heads"),
        num_key_value_heads=lookup.integer("num_key_value_heads"),
        head_dim=lookup.integer("head_dim"),
        intermediate_size=lookup.integer("intermediate_size"),
        rms_norm_eps=lookup.number("rms_norm_eps"),
        rope_theta=_rope_theta(lookup),
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
    good = isinstance(ids, list) and all(type(i) is int and 0 <= i < config.vocab_size for i in ids)
    if not good or not set(ids) - {config.mask_token_id} or any(b <= a for a, b in pairwise(ids)):
        raise CheckpointError(
            f"{path} must list increasing token ids below {config.vocab_size}, the mask id not alone; "
            "export the draft again."
        )
    return tuple(ids)


def _levels(raw: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """`dflash_config` (empty if absent) and the top level."""
    nested = raw.get(_NESTED)
    if nested is not None and not isinstance(nested, Mapping):
        raise CheckpointError(f"{source}: {_NESTED} must be an object, not {nested!r}.")
    return nested or {}, raw


def _refuse_other_kinds(raw: Mapping[str, Any], source: str) -> None:
    """Raise UnsupportedModel for drafts whose weights would load but mean something else."""
    for level in _levels(raw, source):
        for key, kind in _NOT_V1.items():
            if level.get(key):
                raise UnsupportedModel(f"{source} has '{key}': {kind}. This version runs DFlash v1 drafts only.")
    architectures = raw.get("architectures")
    if architectures is not None and architectures != [ARCHITECTURE]:
        raise UnsupportedModel(f"{source} is a draft of class {architectures}; this version runs {ARCHITECTURE} only.")
    for level in _levels(raw, source):
        for key, (harmless, what) in _SWITCHES.items():
            if level.get(key) not in harmless:
                raise UnsupportedModel(
                    f"{source} sets {key} to {level[key]!r}, which asks for {what}: this version does not apply that. "
                    "Use a plain DFlash v1 draft."
                )
        cap = level.get("final_logit_softcapping")
        if cap is not None and not (isinstance(cap, int | float) and cap <= 0):
            raise UnsupportedModel(f"{source} sets final_logit_softcapping, which this version does not apply.")
        if any(kind != "full_attention" for kind in level.get("layer_types") or []):
            raise UnsupportedModel(f"{source} has sliding-window layers; this version runs full-attention drafts only.")


def _check_restated(lookup: _Lookup) -> None:
    """Values that some exports write a second time in another convention must agree."""
    shifted = lookup.find("eagle_aux_hidden_state_layer_ids")
    taps = lookup.integers("target_layer_ids")
    if shifted is not None and shifted != [tap + 1 for tap in taps]:
        raise CheckpointError(
            f"{lookup.source}: eagle_aux_hidden_state_layer_ids {shifted} is not target_layer_ids {list(taps)} plus "
            "one; keep the list the draft was trained with."
        )
    for key, same_as in (("target_hidden_size", "hidden_size"), ("draft_vocab_size", "vocab_size")):
        value = lookup.find(key)
        if value is not None and value != lookup.integer(same_as):
            raise UnsupportedModel(
                f"{lookup.source}: {key} {value} differs from {same_as}; this version runs drafts where they are equal."
            )


def _rope_theta(lookup: _Lookup) -> float:
    """The one theta that is stated, flat, in `rope_parameters` or in its parts per layer type."""
    source = lookup.source
    found: set[float] = set()
    flat = lookup.find("rope_theta")
    places: list[Mapping[str, Any]] = [] if flat is None else [{"rope_theta": flat}]
    for key in ("rope_parameters", "rope_scaling"):
        value = lookup.find(key) or {}
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{source}: {key} must be an object, not {value!r}.")
        places += [value, *(part for part in value.values() if isinstance(part, Mapping))]
    for place in places:
        kind = place.get("rope_type") or place.get("type") or "default"
        if kind != "default":
            raise UnsupportedModel(
                f"{source} scales its rotary embedding ({kind}); this version runs plain rotary only."
            )
        if place.get("rope_theta") is not None:
            found.add(_as_number(place["rope_theta"], "rope_theta", source))
    if not found:
        raise CheckpointError(
            f"{source} has no rope_theta; there is no safe default (1e4, 1e6 and 1e7 are all in use). "
            "Add the value the draft was trained with, usually the target's."
        )
    if len(found) > 1:
        raise CheckpointError(f"{source} states different rope_theta values {sorted(found)}; keep the right one.")
    return found.pop()


def _as_number(value: object, key: str, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{source}: {key} must be a number, not {value!r}.")
    return float(value)


@dataclass(frozen=True)
class _Lookup:
    """Look a key up in `dflash_config`, then at the top level; both and different is an error."""

    raw: Mapping[str, Any]
    source: str

    def find(self, key: str) -> Any:
        inner, outer = (level.get(key) for level in _levels(self.raw, self.source))
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

    def number(self, key: str) -> float:
        return _as_number(self.required(key), key, self.source)

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
