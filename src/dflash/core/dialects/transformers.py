"""Transformers' own draft class (`MuseGlimmerAssistantModel`, 5.19 and later): v1 under other names, keys at the top.

No layer is causal inside the block. `sliding_window` W shows rows up to distance W, the row itself not counted: one
more than everywhere else. The layout has no key for the vocabulary; this project writes one all the same.
"""

from __future__ import annotations

from typing import Any

from dflash.core.dialects import fields
from dflash.core.dialects.base import TOP, Checkpoint, Dialect, Lookup
from dflash.core.dialects.written import rope_parameters, shape_keys
from dflash.core.draft_config import DraftConfig, LayerAttention
from dflash.errors import CheckpointError, UnsupportedModel

ARCHITECTURE, MODEL_TYPE = "MuseGlimmerAssistantModel", "muse_glimmer_assistant"
_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
_STORED = {ours: theirs for theirs, ours in _NAMES.items()}


def matches(found: Checkpoint) -> bool:
    """By model type or by the names of its fusion layer."""
    return found.raw.get("model_type") == MODEL_TYPE or "encoder.fc.weight" in (found.shapes or {})


def resolve(found: Checkpoint, lookup: Lookup) -> DraftConfig:
    """Read a Transformers draft."""
    fields.refuse_other_mathematics(found, lookup)
    if lookup.find("vocab_size") is None:
        raise CheckpointError(
            f"{found.source} has no 'vocab_size', which Transformers' layout leaves out; add the target's."
        )
    attention = fields.attention(found, lookup)
    if lookup.find("layer_types") is None:
        lookup.required("layer_types")  # the class would make every layer slide, silently
    attention["layer_attention"] = tuple(
        LayerAttention(window=None if layer.window is None else layer.window + 1)
        for layer in attention["layer_attention"]
    )
    lookup.decided("causal", "Transformers: no layer is causal inside the block")
    return DraftConfig(
        **fields.geometry(lookup),
        **fields.block(lookup),
        **fields.rope(lookup),
        **fields.own_embedding_and_head(found, lookup),
        **attention,
        target_layer_ids=fields.taps(lookup),
        draft_vocabulary_file=lookup.file_name("draft_vocabulary_file"),
    )


def write_config(config: DraftConfig) -> dict[str, Any]:
    """The config.json of a v1 draft. Raises UnsupportedModel for what the class cannot compute."""
    layers = [config.attention_of(number) for number in range(config.num_hidden_layers)]
    windows = {layer.window for layer in layers if layer.window is not None}
    impossible = {
        "heads of DFlash 2 or DSpark": config.kind != "dflash",
        "an anchor slot that predicts": config.anchor_predicts,
        "a causal block": any(layer.causal for layer in layers),
        "attention sinks": any(layer.sinks for layer in layers),
        "biases in its attention": config.attention_bias,
        "several windows": len(windows) > 1 or config.window_from_anchor,
        "several rotary bases": config.sliding_rope_theta is not None,
        "interleaved rotary pairs": config.rope_interleaved,
        "scaled embeddings or logits": (config.input_embedding_scale, config.output_multiplier) != (1, 1)
        or config.final_logit_softcapping is not None,
        "its own embedding or head": config.owns_embedding or config.owns_head,
        "taps of another width": config.target_hidden_size is not None,
    }
    if asked := [what for what, has in impossible.items() if has]:
        raise UnsupportedModel(f"Transformers' draft class has no {asked[0]}, which this draft has.")
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        **shape_keys(config),
        "rope_parameters": rope_parameters(config),
        "layer_types": ["full_attention" if layer.window is None else "sliding_attention" for layer in layers],
        "sliding_window": windows.pop() - 1 if windows else 2048,  # its class wants a number, used or not
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_target_layers,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
    }
    if config.draft_vocabulary_file is not None:
        values["draft_vocabulary_file"] = config.draft_vocabulary_file
    return values


DIALECT = Dialect(
    name="transformers",
    matches=matches,
    resolve=resolve,
    levels=lambda found: ((TOP, found.raw),),
    canonical=lambda name: _NAMES.get(name, name),
    stored=lambda name: _STORED.get(name, name),
    write=write_config,
)
