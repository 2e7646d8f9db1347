"""EAGLE-3 drafts (arXiv:2503.01840) as SafeAILab writes them, and as SpecForge and ModelOpt do with more keys: a plain
Llama config of one layer with `draft_vocab_size`, tensors `midlayer.*`, `fc`, `norm`, `lm_head`, `d2t`, `t2d`.

Which layers are tapped is said in two numberings, or not at all:

- SafeAILab's modified targets (EAGLE, `modeling_llama_kv.py`) keep the hidden state *before* they run layers 2, n // 2
  and n - 3, and their configs list nothing. vLLM captures before a layer as well, and reads its ids from the top level.
- SpecForge and ModelOpt hook the *outputs* of layers and list them in `eagle_config`; SGLang, which captures before a
  layer, adds one to that list. Their usual 1, n // 2 - 1 and n - 4 are the same states as SafeAILab's.

Here a tap is the output of a layer: ids of the top level less one, ids of `eagle_config` as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash.core.dialects import fields
from dflash.core.dialects.base import TOP, Checkpoint, Dialect, Lookup
from dflash.core.draft_config import DraftConfig
from dflash.core.eagle3_config import CHAIN, NO_MASK, Eagle3Config, Llama3Rope
from dflash.errors import CheckpointError, UnsupportedModel

IDS, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"
DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"
SAFEAILAB_THETA = 10_000.0
"""The rotary base of SafeAILab's network (and of Transformers' LlamaConfig) where a config names none."""
_BLOCK_KEYS = ("block_size", "dflash_config", "mask_token_id", "target_layer_ids")
_ROPE_KEYS = ("rope_scaling", "rope_parameters")
_NESTED_SWITCHES: Mapping[str, tuple[tuple[object, ...], str]] = {
    "use_aux_hidden_state": ((None, True), "the target's final hidden state instead of taps"),
    "use_input_layernorm_in_first_layer": ((None, True), "a first layer without a norm on its embeddings"),
    "use_last_layernorm": ((None, True), "no norm before its head"),
    "use_mtp_layernorm": ((None, False), "further norms"),
    "parallel_draft_step": ((None, 1), "several tokens per step"),
    "eagle_decoder_type": ((None, "llama"), "other layers than Llama's"),
}
"""Keys of `eagle_config` that change the mathematics: the harmless values, and what any other asks for."""


def matches(found: Checkpoint) -> bool:
    """By class name, by a first layer that reads two hidden sizes side by side, or by a language model's config with a
    reduced head; block drafts, which share single signs, say what their block is."""
    if any(key in found.raw or key in found.level("dflash_config") for key in _BLOCK_KEYS):
        return False
    if any("eagle3" in name.lower() for name in found.architectures) or found.raw.get(NESTED):
        return True
    if found.shapes is None:
        return found.raw.get("draft_vocab_size") is not None and found.raw.get("num_hidden_layers") == 1
    return reads_two_states(found)


def reads_two_states(found: Checkpoint) -> bool:
    """Whether the first layer's projections read an embedding and a hidden state: no other kind of draft does."""
    shapes = found.shapes or {}
    for layer in ("midlayer", "layers.0"):
        norm, queries = (shapes.get(f"{layer}.{name}.weight") for name in ("input_layernorm", "self_attn.q_proj"))
        if norm is not None and queries is not None and queries[1:] == tuple(2 * size for size in norm):
            return True
    return False


def resolve(found: Checkpoint, lookup: Lookup) -> DraftConfig:
    """Read an EAGLE-3 draft of SafeAILab's kind."""
    _refuse_other_networks(found, lookup)
    unstated = lookup.find("rope_theta") is None and not any(found.level(key).get("rope_theta") for key in _ROPE_KEYS)
    if unstated:
        lookup = _with_level(lookup, "SafeAILab's own default", {"rope_theta": SAFEAILAB_THETA})
    values = layer_fields(found, lookup, lookup)
    if unstated:
        lookup.decided("rope_theta", f"not stated: {SAFEAILAB_THETA:g}, as SafeAILab's network")
    lookup.decided("block_size", f"{CHAIN} steps, as SafeAILab trains")
    return Eagle3Config(**values, target_layer_ids=_taps(found, lookup), block_size=CHAIN + 1)


def layer_fields(found: Checkpoint, lookup: Lookup, inner: Lookup) -> dict[str, Any]:
    """Everything but taps and chain; `inner` finds the keys of the layer, `lookup` those of the draft around it."""
    fields.refuse_other_mathematics(found, inner)
    _refuse_windows(inner)
    heads = inner.integer("num_attention_heads")
    usual = {"num_key_value_heads": heads, "head_dim": inner.integer("hidden_size") // max(heads, 1)}
    absent = {key: value for key, value in usual.items() if inner.find(key) is None}
    values: dict[str, Any] = fields.geometry(_with_level(inner, "as num_attention_heads says", absent))
    size = lookup.optional_integer("draft_vocab_size")
    reduced = size is not None and size != values["vocab_size"]
    lookup.decided("mask_token_id", "EAGLE-3 has none")
    return values | {
        **rope(inner),
        **own_tables(found, lookup, reduced=reduced),
        **_norms(lookup),
        "attention_bias": fields.attention_bias(found, inner),
        "target_hidden_size": lookup.optional_integer("target_hidden_size"),
        "num_target_layers": lookup.optional_integer("num_target_layers"),
        "draft_vocab_size": size if reduced else None,
        "mask_token_id": NO_MASK,
        "head_norms": found.has_tensor("self_attn.q_norm.weight"),
    }


def own_tables(found: Checkpoint, lookup: Lookup, *, reduced: bool) -> dict[str, Any]:
    """Whose embedding and head are used, and whether the rows of a reduced head are known.

    Raises CheckpointError for a reduced head without its table, and for a tied head of which nothing says whose it is.
    """
    owned = fields.own_embedding_and_head(found, lookup)
    if found.shapes is None:
        return owned | {"owns_head": reduced}
    if reduced and DRAFT_TO_TARGET not in found.shapes:
        raise CheckpointError(
            f"{lookup.source} has a reduced vocabulary, but the weights have no table {DRAFT_TO_TARGET}: the rows of "
            "its head stand for unknown tokens. Download or export the draft again."
        )
    if lookup.flag("tie_word_embeddings") and owned["owns_embedding"] and not owned["owns_head"]:
        raise CheckpointError(
            f"{lookup.source} ties the head to the draft's own embedding and the weights have no lm_head.weight: "
            "programs differ on which head is meant. Store the head as lm_head.weight, or set tie_word_embeddings to "
            "false to use the target's."
        )
    return owned | ({"owns_head": True} if reduced else {})  # a missing head is then a missing tensor


def rope(lookup: Lookup) -> dict[str, Any]:
    """Theta, and plain, linear, Llama 3.1's or YaRN's scaling. Raises as `fields.rope`."""
    scalings: list[dict[str, Any]] = []
    plain: dict[str, Any] = {}
    for key in _ROPE_KEYS:
        place = lookup.find(key)
        kind = (place.get("rope_type") or place.get("type")) if isinstance(place, Mapping) else None
        if kind in ("linear", "llama3"):
            part = Lookup(lookup.source, ((key, place),))
            scaling = {"rope_factor": part.number("factor")} if kind == "linear" else {"llama3": _llama3(part)}
            if scaling not in scalings:
                scalings.append(scaling)
            plain[key] = {"rope_theta": place.get("rope_theta")}
    if len(scalings) > 1:
        raise CheckpointError(f"{lookup.source} scales its rotary embedding in two different ways; keep the right one.")
    levels = [
        (label, level | {key: plain[key] for key in plain.keys() & level.keys()}) for label, level in _copies(lookup)
    ]
    read = fields.rope(Lookup(lookup.source, levels, lookup.origins, lookup.notes))
    return read | (scalings[0] if scalings else {})


def _llama3(place: Lookup) -> Llama3Rope:
    return Llama3Rope(
        factor=place.number("factor"),
        low_freq_factor=place.number("low_freq_factor"),
        high_freq_factor=place.number("high_freq_factor"),
        original_max_position_embeddings=place.integer("original_max_position_embeddings"),
    )


def _copies(lookup: Lookup) -> list[tuple[str, dict[str, Any]]]:
    return [(label, dict(level)) for label, level in lookup.levels]


def _with_level(lookup: Lookup, label: str, values: Mapping[str, Any]) -> Lookup:
    """The same look-up with values for what no other level says; where they were taken from it, the origins tell."""
    return dataclasses.replace(lookup, levels=(*lookup.levels, (label, values)))


def _norms(lookup: Lookup) -> dict[str, Any]:
    """Switches that vLLM, Speculators and SpecForge share."""
    whole, each = bool(lookup.flag("norm_before_fc")), bool(lookup.flag("fc_norm"))
    if whole and each:
        raise CheckpointError(
            f"{lookup.source} sets norm_before_fc and fc_norm; keep the one the draft was trained with."
        )
    return {
        "norm_before_residual": bool(lookup.flag("norm_before_residual")),
        "fused_norm": "whole" if whole else "each" if each else "",
        "feeds_normed": bool(lookup.flag("norm_output")),
    }


def _taps(found: Checkpoint, lookup: Lookup) -> tuple[int, ...]:
    """As outputs of layers; () where the checkpoint leaves them to the target's depth."""
    inner = found.level(NESTED)
    nested = Lookup(lookup.source, ((NESTED, inner),)).integers(IDS) if inner.get(IDS) else ()
    top = entering(found, lookup)
    if nested and top and nested != top:
        raise CheckpointError(
            f"{lookup.source}: {IDS} {list(found.raw[IDS])} at the top level (layers by what enters them) and "
            f"{list(nested)} in {NESTED} (layers by their outputs) are different layers; keep the right list."
        )
    if nested:
        lookup.decided("target_layer_ids", f"{NESTED}, {IDS} (outputs of layers)")
    return nested or top


def entering(found: Checkpoint, lookup: Lookup) -> tuple[int, ...]:
    """Taps from the list at the top level, whose ids name what enters a layer; () without one."""
    if not found.raw.get(IDS):
        lookup.decided("target_layer_ids", "not stated: inputs of layers 2, n // 2 and n - 3, as SafeAILab and vLLM")
        return ()
    ids = Lookup(lookup.source, ((TOP, found.raw),)).integers(IDS)
    return fields.taps_from_inputs(lookup, IDS, ids)


def _refuse_other_networks(found: Checkpoint, lookup: Lookup) -> None:
    nested = found.level(NESTED)
    for key, (harmless, what) in _NESTED_SWITCHES.items():
        if nested.get(key) not in harmless:
            raise UnsupportedModel(
                f"{lookup.source} sets {key} to {nested[key]!r} in {NESTED}, which asks for {what}: this version does "
                "not have that. Use another draft."
            )
    if found.has_tensor("self_attn.kv_a_proj_with_mqa.weight"):
        raise UnsupportedModel(f"{lookup.source} is an EAGLE-3 draft with latent attention, which is not here.")
    if found.raw.get("parallel_drafting") or found.has_tensor("mask_hidden"):
        raise UnsupportedModel(f"{lookup.source} is a P-EAGLE draft, which writes in parallel; that is not here.")


def _refuse_windows(lookup: Lookup) -> None:
    kinds = lookup.find("layer_types") or []
    if lookup.flag("use_sliding_window") or any(kind != "full_attention" for kind in kinds):
        raise UnsupportedModel(
            f"{lookup.source} gives the EAGLE-3 layer a sliding window, which this version does not run; use a draft "
            "with full attention."
        )


def canonical(name: str) -> str | None:
    """`midlayer.` is the only layer; the tables are read apart."""
    if name in (DRAFT_TO_TARGET, TARGET_TO_DRAFT):
        return None
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


DIALECT = Dialect(
    name="eagle3",
    matches=matches,
    resolve=resolve,
    levels=lambda found: ((TOP, found.raw),),
    canonical=canonical,
)
