"""Readings that several dialects share: geometry, rotary embedding, windows and causality, scales, heads.

Each function takes a `Lookup` and returns part of a `DraftConfig`'s fields. Rules that differ between dialects are
arguments; nothing here asks which dialect it serves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dflash.core.dialects.base import TOP, Checkpoint, Lookup, as_number
from dflash.core.draft_config import LayerAttention, Yarn
from dflash.errors import CheckpointError, UnsupportedModel

_REFUSED_SWITCHES: Mapping[str, tuple[tuple[object, ...], str]] = {
    "attention_value_scale": ((None, 1), "scaled attention values"),
    "log_snr_conditioning": ((None, False), "noise-level embeddings"),
    "hidden_act": ((None, "silu"), "another activation than silu"),
    "enable_qwen35_gated_q_proj": ((None, False), "gated query projections"),
}
"""Keys that change the mathematics in a way no network here has: the harmless values, and what any other asks for."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


def geometry(lookup: Lookup) -> dict[str, Any]:
    """Sizes of the layers."""
    return {
        "hidden_size": lookup.integer("hidden_size"),
        "num_hidden_layers": lookup.integer("num_hidden_layers"),
        "num_attention_heads": lookup.integer("num_attention_heads"),
        "num_key_value_heads": lookup.integer("num_key_value_heads"),
        "head_dim": lookup.integer("head_dim"),
        "intermediate_size": lookup.integer("intermediate_size"),
        "rms_norm_eps": lookup.number("rms_norm_eps"),
        "vocab_size": lookup.integer("vocab_size"),
    }


def block(lookup: Lookup) -> dict[str, Any]:
    """Block size and mask id, and what else says something about the target."""
    return {
        "block_size": lookup.integer("block_size"),
        "mask_token_id": lookup.integer("mask_token_id"),
        "num_target_layers": lookup.optional_integer("num_target_layers"),
        "target_hidden_size": lookup.optional_integer("target_hidden_size"),
    }


def taps(lookup: Lookup, *, embedding_is: int | None = None) -> tuple[int, ...]:
    """Taps of dialects whose ids mean the output of layer z; the list of residuals entering a layer (z + 1), which
    some exports restate, must agree. `embedding_is`: the id of the embedding output, in dialects that have one."""
    key = "target_layer_ids"
    ids = lookup.integers(key)
    if embedding_is in ids:
        raise UnsupportedModel(
            f"{lookup.source}: {key} {list(ids)} taps the embedding output ({embedding_is}), which this version does "
            "not capture; use a draft whose taps are layers."
        )
    shifted = lookup.find("eagle_aux_hidden_state_layer_ids")
    if shifted is not None and shifted != [tap + 1 for tap in ids]:
        raise CheckpointError(
            f"{lookup.source}: eagle_aux_hidden_state_layer_ids {shifted} is not {key} {list(ids)} plus one; keep the "
            "list the draft was trained with."
        )
    return ids


def scales(lookup: Lookup) -> dict[str, Any]:
    """Factors on input embeddings and logits."""
    cap = lookup.optional_number("final_logit_softcapping")
    scale, multiplier = lookup.optional_number("input_embedding_scale"), lookup.optional_number("output_multiplier")
    return {
        "input_embedding_scale": 1.0 if scale is None else scale,
        "output_multiplier": 1.0 if multiplier is None else multiplier,
        "final_logit_softcapping": None if cap is None or cap <= 0 else cap,
    }


def rope(lookup: Lookup, *, scaling: bool = True, sliding_for_all: bool = False) -> dict[str, Any]:
    """Theta (per kind of layer), YaRN and the order of the pairs.

    `scaling` False: this dialect copies the target's scaling without having been seen to use it, so it is refused.
    `sliding_for_all`: where thetas are stated per kind of layer, every layer uses that of the sliding ones.
    """
    shared, by_kind, kinds = _thetas(lookup)
    if sliding_for_all and _SLIDING in by_kind:
        by_kind = {_SLIDING: by_kind[_SLIDING]}
    if not shared and not by_kind:
        raise CheckpointError(
            f"{lookup.source} has no rope_theta; there is no safe default (1e4, 1e6 and 1e7 are all in use). "
            "Add the value the draft was trained with, usually the target's."
        )
    if len(shared) > 1 or any(theta not in shared for theta in by_kind.values() if shared):
        stated = sorted(shared | set(by_kind.values()))
        raise CheckpointError(f"{lookup.source} states different rope_theta values {stated}; keep the right one.")
    theta = next(iter(shared)) if shared else by_kind.get(_FULL, by_kind.get(_SLIDING))
    interleaved = [
        not value for key in ("rope_is_neox_style", "is_neox_style") if (value := lookup.flag(key)) is not None
    ]
    if len(set(interleaved)) > 1:
        raise CheckpointError(f"{lookup.source} says both that its rotary pairs are neighbours and that they are not.")
    yarn = _yarn(kinds, lookup)
    if yarn is not None and not scaling:
        raise UnsupportedModel(
            f"{lookup.source} carries YaRN scaling, which this kind of checkpoint may have copied from its target "
            "unused; take it out of rope_parameters if the draft was trained without, or use another draft."
        )
    lookup.decided("rope_theta", "rope_theta / rope_parameters")
    return {
        "rope_theta": theta,
        "sliding_rope_theta": by_kind.get(_SLIDING),
        "yarn": yarn,
        "rope_interleaved": bool(interleaved and interleaved[0]),
    }


def _thetas(lookup: Lookup) -> tuple[set[float], dict[str, float], list[Mapping[str, Any]]]:
    """Thetas stated for all layers, those stated per kind of layer, and every object that describes rotary."""
    source = lookup.source
    flat = lookup.find("rope_theta")
    shared = set() if flat is None else {as_number(flat, "rope_theta", source)}
    by_kind: dict[str, float] = {}
    places: list[Mapping[str, Any]] = []
    for key in ("rope_parameters", "rope_scaling"):
        value = lookup.find(key) or {}
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{source}: {key} must be an object, not {value!r}.")
        places += [value] if value else []
        if value.get("rope_theta") is not None:
            shared.add(as_number(value["rope_theta"], "rope_theta", source))
        for kind, part in value.items():
            if isinstance(part, Mapping):
                places.append(part)
                if part.get("rope_theta") is not None:
                    theta = as_number(part["rope_theta"], "rope_theta", source)
                    if by_kind.setdefault(kind, theta) != theta:
                        raise CheckpointError(
                            f"{source} states different rope_theta values for {kind}; keep the right one."
                        )
    return shared, by_kind, places


def _yarn(places: list[Mapping[str, Any]], lookup: Lookup) -> Yarn | None:
    found: set[Yarn | None] = set()
    for place in places:
        kind = place.get("rope_type") or place.get("type") or ("default" if "rope_theta" in place else None)
        if kind is None:
            continue  # an object that only groups others
        if kind in ("default", "mrope"):  # sections of M-RoPE are all equal for text
            found.add(None)
            continue
        if kind != "yarn":
            raise UnsupportedModel(
                f"{lookup.source} scales its rotary embedding ({kind}); this version runs plain rotary and YaRN only."
            )
        found.add(_read_yarn(place, lookup.source))
    if len(found) > 1:
        raise CheckpointError(f"{lookup.source} scales its rotary embedding in two different ways; keep the right one.")
    return found.pop() if found else None


def _read_yarn(place: Mapping[str, Any], source: str) -> Yarn:
    def need(key: str) -> float:
        if place.get(key) is None:
            raise CheckpointError(f"{source}: YaRN without '{key}'; add the value the draft was trained with.")
        return as_number(place[key], key, source)

    if place.get("mscale") is not None or place.get("mscale_all_dim") is not None or place.get("truncate") is False:
        raise UnsupportedModel(f"{source} uses YaRN with mscale or without truncation, which this version does not.")
    factor = need("factor")
    if factor <= 0:
        raise CheckpointError(f"{source}: the YaRN factor must be positive, not {factor}.")
    given = place.get("attention_factor")
    return Yarn(
        factor=factor,
        original_max_position_embeddings=int(need("original_max_position_embeddings")),
        attention_factor=_default_attention_factor(factor) if given is None else need("attention_factor"),
        **{key: need(key) for key in ("beta_fast", "beta_slow") if place.get(key) is not None},
    )


def _default_attention_factor(factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def attention(found: Checkpoint, lookup: Lookup, *, window_everywhere: bool = False) -> dict[str, Any]:
    """Window, causality and sinks of each layer.

    An explicit `is_causal` (or `causal`, `dflash_query_causal`) holds for all layers; else a layer with a window is
    causal inside the block and a full one is not. `use_swa` without sliding layers puts a window on every layer and
    leaves all of them bidirectional; so does `window_everywhere`, for dialects that state a window only.
    """
    num_layers = lookup.integer("num_hidden_layers")
    causal = lookup.flag("is_causal", "causal", "dflash_query_causal")
    kinds = _layer_kinds(lookup, num_layers)
    everywhere = (window_everywhere or bool(lookup.flag("use_swa"))) and _SLIDING not in kinds
    slides = [True] * num_layers if everywhere else [kind == _SLIDING for kind in kinds]
    window = _window(lookup) if any(slides) else None
    if causal is None:
        by = [slide and not everywhere for slide in slides]
        lookup.decided("causal", "use_swa: bidirectional" if everywhere else "sliding layers causal, full layers not")
    else:
        by = [causal] * num_layers
    sinks = _sinks(found, lookup, num_layers)
    layers = zip(slides, by, sinks, strict=True)
    return {
        "layer_attention": tuple(
            LayerAttention(window=window if slide else None, causal=is_causal, sinks=sink)
            for slide, is_causal, sink in layers
        ),
        "attention_bias": attention_bias(found, lookup),
    }


def _layer_kinds(lookup: Lookup, num_layers: int) -> list[str]:
    kinds = lookup.find("layer_types")
    if kinds is None:
        if lookup.flag("use_sliding_window"):
            raise CheckpointError(
                f"{lookup.source} has use_sliding_window but no layer_types; write which layers slide."
            )
        if num_layers > 10_000:
            raise CheckpointError(f"{lookup.source}: num_hidden_layers {num_layers} is not plausible.")
        return [_FULL] * num_layers
    if not isinstance(kinds, list) or any(kind not in (_FULL, _SLIDING) for kind in kinds):
        raise UnsupportedModel(
            f"{lookup.source}: layer_types must name {_FULL} or {_SLIDING} per layer; other kinds of draft layers do "
            "not run here."
        )
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"{lookup.source}: layer_types has {len(kinds)} entries, but num_hidden_layers is {num_layers}."
        )
    if _SLIDING in kinds and lookup.flag("use_sliding_window") is False:
        raise CheckpointError(
            f"{lookup.source} has sliding layers in layer_types and use_sliding_window false; keep what the draft was "
            "trained with."
        )
    return kinds


def _window(lookup: Lookup) -> int:
    keys = ("swa_window_size", "sliding_window") if lookup.flag("use_swa") else ("sliding_window", "swa_window_size")
    first = lookup.optional_integer(keys[0])
    return lookup.integer(keys[1]) if first is None else first


def _sinks(found: Checkpoint, lookup: Lookup, num_layers: int) -> list[bool]:
    """Sinks are where their tensors are; a config that promises them and has none is refused by the tensor check."""
    promised = bool(lookup.flag("attention_sink_bias", "add_swa_attention_sink_bias"))
    if found.shapes is None:
        return [promised] * num_layers
    sinks = [f"layers.{i}.self_attn.attention_sink_bias" in found.shapes for i in range(num_layers)]
    if promised and not any(sinks):
        raise CheckpointError(f"{lookup.source} sets attention_sink_bias, but the weights have no such tensor.")
    return sinks


def attention_bias(found: Checkpoint, lookup: Lookup) -> bool:
    """Whether the projections have biases: the config's word, which the tensors must bear out."""
    said = lookup.flag("attention_bias")
    if found.shapes is None:
        return bool(said)
    there = found.has_tensor("self_attn.q_proj.bias")
    if said is not None and said != there:
        raise CheckpointError(
            f"{lookup.source} sets attention_bias to {str(said).lower()}, but the weights "
            f"{'have' if there else 'lack'} biases in their attention; config.json and weights do not belong together."
        )
    return there


def own_embedding_and_head(found: Checkpoint, lookup: Lookup) -> dict[str, Any]:
    """Which of both the checkpoint carries: decided by its tensors."""
    shapes = found.shapes or {}
    fields = {"owns_embedding": "embed_tokens.weight" in shapes, "owns_head": "lm_head.weight" in shapes}
    for field, key in (("owns_embedding", "has_embed_tokens"), ("owns_head", "has_lm_head")):
        if found.shapes is not None and lookup.flag(key) not in (None, fields[field]):
            raise CheckpointError(
                f"{lookup.source} sets {key} to {str(not fields[field]).lower()}, but the weights say otherwise; "
                "config.json and weights do not belong together."
            )
        lookup.decided(field, "tensors")
    return fields


def full_vocabulary(lookup: Lookup) -> None:
    """Raise UnsupportedModel where a dialect without a table of ids has a reduced head."""
    size = lookup.optional_integer("draft_vocab_size")
    if size is not None and size != lookup.integer("vocab_size"):
        raise UnsupportedModel(
            f"{lookup.source}: draft_vocab_size {size} differs from vocab_size, and this kind of checkpoint has no "
            "table of the kept ids; this version runs such drafts only as Speculators checkpoints."
        )


def markov(found: Checkpoint, lookup: Lookup, hidden_size: int) -> dict[str, Any]:
    """DSpark's heads, as their tensors show them; what the config says as well must agree."""
    said = _stated_markov(lookup)
    if found.shapes is None:
        if said["markov_rank"] is None:
            lookup.required("markov_rank")
        return {key: value or ("" if key == "markov_head" else False) for key, value in said.items()} | {
            "markov_rank": said["markov_rank"]
        }
    shapes = found.shapes
    codes, confidence = shapes.get("markov_head.markov_w1.weight"), shapes.get("confidence_head.proj.weight")
    kinds = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
    kind = next((kind for name, kind in kinds.items() if name in shapes), "vanilla")
    rank = codes[1] if codes is not None and len(codes) == 2 else 0
    shown: dict[str, Any] = {
        "markov_rank": rank,
        "markov_head": kind if rank else "",
        "confidence_head": confidence is not None,
        "confidence_with_markov": bool(rank) and confidence == (1, hidden_size + rank),
    }
    for key, value in said.items():
        if value is not None and value != shown[key]:
            raise CheckpointError(
                f"{lookup.source}: the config says {key} {value!r}, the weights show {shown[key]!r}; they do not "
                "belong together."
            )
        if value is None:
            lookup.decided(key, "tensors")
    return shown


def _stated_markov(lookup: Lookup) -> dict[str, Any]:
    """What the config says about DSpark's heads; None where it says nothing that matters."""
    rank = lookup.optional_integer("markov_rank")
    kind = lookup.optional_text("markov_head_type")
    confidence = lookup.flag("enable_confidence_head", "use_confidence_head")
    with_markov = lookup.flag("confidence_head_with_markov")
    return {
        "markov_rank": rank,
        "markov_head": None if kind is None or rank == 0 else kind.lower(),
        "confidence_head": confidence,
        "confidence_with_markov": with_markov if confidence else None,
    }


def anchor_predicts(lookup: Lookup, otherwise: bool, why: str) -> bool:
    """Whether slot 0 predicts: an explicit key, else what the dialect does."""
    readings = set()
    if (said := lookup.flag("sample_from_anchor")) is not None:
        readings.add(said)
    if (start := lookup.optional_integer("logits_start")) is not None:
        if start not in (0, 1):
            raise CheckpointError(f"{lookup.source}: logits_start must be 0 or 1, not {start}.")
        readings.add(start == 0)
    if (shifted := lookup.flag("shift_label")) is not None:
        readings.add(shifted)
    if len(readings) > 1:
        raise CheckpointError(
            f"{lookup.source} says both that the anchor slot predicts and that it does not (sample_from_anchor, "
            "logits_start, shift_label); keep what the draft was trained with."
        )
    if not readings:
        lookup.decided("anchor_predicts", why)
    return readings.pop() if readings else otherwise


def refuse_other_mathematics(found: Checkpoint, lookup: Lookup) -> None:
    """Raise UnsupportedModel for settings that no network here has, and for quantised weights."""
    for key, (harmless, what) in _REFUSED_SWITCHES.items():
        value = lookup.find(key)
        if value not in harmless:
            raise UnsupportedModel(
                f"{lookup.source} sets {key} to {value!r}, which asks for {what}: this version does not apply that. "
                "Use a draft without it."
            )
    if found.raw.get("quantization_config"):
        raise UnsupportedModel(
            f"{lookup.source} describes quantised weights (quantization_config); this version runs drafts in bfloat16, "
            "float16 or float32: use the draft that it was quantised from."
        )


def taps_from_inputs(lookup: Lookup, key: str, layers: Sequence[int]) -> tuple[int, ...]:
    """Taps from the ids of layers whose input is tapped, stated at the top level as `key`: a state entering layer i is
    the output of layer i - 1. Raises UnsupportedModel for the input of layer 0, which no layer puts out."""
    if 0 in layers:
        raise UnsupportedModel(
            f"{lookup.source} taps the embedding output ({key} 0), which this version does not capture; use a draft "
            "whose taps are layers."
        )
    lookup.decided("target_layer_ids", f"{TOP}, {key} minus one")
    return tuple(layer - 1 for layer in layers)
