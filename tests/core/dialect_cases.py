"""One hand-written checkpoint of every kind that is read, with the description it must give."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dflash.core.draft_config import DraftConfig, LayerAttention, Yarn
from dflash.core.draft_reader import DraftDescription, read_draft
from tests.core.draft_folders import (
    BLOCK,
    CONFIDENCE,
    CONVOLUTIONS,
    FULL,
    LAYERS,
    MARKOV,
    MASK,
    OWN,
    PLAIN,
    SELECTOR,
    SIZES,
    TAPS,
    H,
    Tensors,
    V,
    tensors,
    v1_tensors,
    write_draft,
)
from tests.core.eagle3_cases import EAGLE3_CASES

V1 = DraftConfig(
    **SIZES, rope_theta=1e6, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=TAPS, num_target_layers=36
)
IDS: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
SLIDES = ["sliding_attention"] * LAYERS


def changed(**values: Any) -> DraftConfig:
    return dataclasses.replace(V1, **values)


DSPARK = changed(
    anchor_predicts=True, markov_rank=6, markov_head="vanilla", confidence_head=True, confidence_with_markov=True
)
HEADS: dict[str, Any] = {
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def speculators(**values: Any) -> dict[str, Any]:
    """What Speculators 0.5 writes for a dflash draft, with changes at the top level."""
    inner = {**SIZES, "model_type": "qwen3", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    method = {"proposal_type": "greedy", "speculative_tokens": BLOCK - 1, "verifier_accept_k": 1}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [method],
            "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": inner | {"layer_types": FULL, "use_sliding_window": False},
        "draft_vocab_size": V,
        "block_size": BLOCK,
        "num_target_layers": 36,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        "sliding_window_non_causal": False,
        **values,
    }


def proposing(width: int | None, algorithm: str = "dflash", **values: Any) -> dict[str, Any]:
    """A Speculators config made to propose `width` tokens."""
    config = speculators(speculators_model_type=algorithm, **values)
    method = {"proposal_type": "greedy", "verifier_accept_k": 1}
    config["speculators_config"] = {
        "algorithm": algorithm,
        "proposal_methods": [method if width is None else method | {"speculative_tokens": width}],
    }
    return config


MODELOPT = {name.removeprefix("markov_head."): entry for name, entry in MARKOV.items()} | tensors(
    confidence_proj__weight=(1, H + 6), confidence_proj__bias=(1,)
)
SINKS = {f"layers.{number}.self_attn.attention_sink_bias": ("BF16", (4,)) for number in range(LAYERS)}
ENCODER = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
TRANSFORMERS: Tensors = {ENCODER.get(name, name): entry for name, entry in v1_tensors().items()}

CASES: dict[str, tuple[str, dict[str, Any], Tensors, DraftConfig]] = {
    "z-lab nested": ("z-lab", {**PLAIN, "dflash_config": IDS, "layer_types": FULL}, v1_tensors(), V1),
    "z-lab flat": ("z-lab", {**PLAIN, **IDS, "architectures": ["DFlashDraftModel"]}, v1_tensors(), V1),
    "z-lab all nested": (
        "z-lab",
        {**SIZES, "num_target_layers": 36, "rope_theta": 1e6, "dflash_config": IDS | {"block_size": BLOCK}},
        v1_tensors(),
        V1,
    ),
    "z-lab with both lists of ids": (
        "z-lab",
        {**PLAIN, **IDS, "eagle_aux_hidden_state_layer_ids": [2, 10, 18]},
        v1_tensors(),
        V1,
    ),
    "attention biases": (
        "z-lab",
        {**PLAIN, **IDS, "attention_bias": True},
        v1_tensors()
        | {
            f"layers.{number}.self_attn.{name}.bias": ("BF16", (size,))
            for number in range(LAYERS)
            for name, size in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16), ("o_proj", H))
        },
        changed(attention_bias=True),
    ),
    "scales": (
        "z-lab",
        {**PLAIN, **IDS, "dflash_config": {"output_multiplier": 0.25}, "input_embedding_scale": 4, "hidden_act": "silu"}
        | {"final_logit_softcapping": 30.0},
        v1_tensors(),
        changed(output_multiplier=0.25, input_embedding_scale=4.0, final_logit_softcapping=30.0),
    ),
    "midlayer": (
        "z-lab",
        {**PLAIN, **IDS, "num_hidden_layers": 1},
        {
            name.replace("layers.0.", "midlayer."): entry
            for name, entry in v1_tensors().items()
            if not name.startswith("layers.1.")
        },
        changed(num_hidden_layers=1),
    ),
    "dflash2": (
        "dflash2",
        {**PLAIN, "is_causal": False, "layer_types": SLIDES, "sliding_window": 64, "use_sliding_window": True}
        | {"dflash_config": IDS | {"conv_kernel_size": 2, "conv_group_size": 8}, "selector_rank": 5}
        | {"selector_top_k": 4, "architectures": ["DFlash2DraftModel"]},
        v1_tensors() | CONVOLUTIONS | SELECTOR,
        changed(
            layer_attention=(LayerAttention(window=64),) * LAYERS,
            conv_kernel_size=2,
            conv_group_size=8,
            selector_rank=5,
            selector_top_k=4,
        ),
    ),
    "dflash2 with another program's codebook names": (
        "dflash2",
        {**PLAIN, "dflash_config": IDS, "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5}
        | {"selector_top_k": 4},
        v1_tensors()
        | CONVOLUTIONS
        | {name + ("" if name.endswith("weight") else ".weight"): entry for name, entry in SELECTOR.items()},
        changed(conv_kernel_size=2, conv_group_size=8, selector_rank=5, selector_top_k=4),
    ),
    "deepspec dspark": (
        "deepspec",
        {**PLAIN, **IDS, **HEADS, "architectures": ["Qwen3DSparkModel"], "layer_types": FULL, "num_anchors": 512},
        v1_tensors() | OWN | MARKOV | CONFIDENCE,
        dataclasses.replace(DSPARK, owns_embedding=True, owns_head=True),
    ),
    "deepspec dflash block7: v1 whose anchor predicts": (
        "deepspec",
        {**PLAIN, **IDS, "architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "enable_confidence_head": False},
        v1_tensors() | OWN,
        changed(anchor_predicts=True, owns_embedding=True, owns_head=True),
    ),
    "specforge dspark": (
        "specforge",
        {**PLAIN, "dflash_config": IDS | HEADS | {"projector_type": "dspark"}, "architectures": ["DSparkDraftModel"]}
        | {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192}},
        v1_tensors() | MARKOV | CONFIDENCE,
        dataclasses.replace(
            DSPARK, yarn=Yarn(factor=32.0, original_max_position_embeddings=8192, attention_factor=1.3465735902799727)
        ),
    ),
    "modelopt dspark": (
        "modelopt",
        {
            **PLAIN,
            "dflash_config": IDS | {"projector_type": "dspark", "use_confidence_head": True, "shift_label": True},
        },
        v1_tensors() | MODELOPT,
        DSPARK,
    ),
    "modelopt dspark that keeps the anchor": (
        "modelopt",
        {**PLAIN, "dflash_config": IDS | {"projector_type": "dspark", "use_confidence_head": True}},
        v1_tensors() | MODELOPT,
        dataclasses.replace(DSPARK, anchor_predicts=False),
    ),
    "lfm2 dspark": (
        "lfm2",
        {**PLAIN, "dflash_config": IDS, "architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False},
        v1_tensors() | OWN | MARKOV | CONFIDENCE,
        dataclasses.replace(DSPARK, owns_embedding=True, owns_head=True, rope_interleaved=True),
    ),
    "nemotron dspark": (
        "nemotron",
        {**PLAIN, **IDS, **HEADS, "architectures": ["Qwen3DSparkModel"], "dflash_query_causal": True}
        | {"attention_sink_bias": True, "has_lm_head": False, "sample_from_anchor": False, "sliding_window": 64}
        | {"eagle_aux_hidden_state_layer_ids": [2, 10, 18]},
        v1_tensors() | MARKOV | CONFIDENCE | SINKS | {"embed_tokens.weight": OWN["embed_tokens.weight"]},
        dataclasses.replace(
            DSPARK,
            anchor_predicts=False,
            owns_embedding=True,
            layer_attention=(LayerAttention(window=64, causal=True, sinks=True),) * LAYERS,
        ),
    ),
    "speculators dflash": ("speculators", speculators(), v1_tensors(), V1),
    "speculators with frozen copies": (
        "speculators",
        speculators(),
        v1_tensors() | OWN | tensors(verifier_norm__weight=(H,), verifier_lm_head__weight=(V, H)),
        changed(owns_embedding=True, owns_head=True),
    ),
    "speculators sliding": (
        "speculators",
        speculators(
            transformer_layer_config=speculators()["transformer_layer_config"]
            | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "use_sliding_window": True}
        ),
        v1_tensors(),
        changed(layer_attention=(LayerAttention(window=64, causal=True), LayerAttention()), window_from_anchor=True),
    ),
    "speculators dspark": (
        "speculators",
        proposing(BLOCK, "dspark", **HEADS),
        v1_tensors() | MARKOV | CONFIDENCE,
        DSPARK,
    ),
    "transformers": (
        "transformers",
        {**SIZES, **IDS, "model_type": "muse_glimmer_assistant", "block_size": BLOCK, "layer_types": FULL}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "num_target_layers": 36},
        TRANSFORMERS,
        V1,
    ),
    "transformers sliding": (
        "transformers",
        {**PLAIN, **IDS, "model_type": "muse_glimmer_assistant", "layer_types": SLIDES, "sliding_window": 64},
        TRANSFORMERS,
        changed(layer_attention=(LayerAttention(window=65),) * LAYERS),
    ),
    **EAGLE3_CASES,
}


def read(folder: Path, config: dict[str, Any], held: Tensors, data: dict[str, bytes] | None = None) -> DraftDescription:
    return read_draft(write_draft(folder / "draft", config, held, data))
