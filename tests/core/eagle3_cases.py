"""Hand-written EAGLE-3 checkpoints of each layout, and the description that they must give."""

from __future__ import annotations

import dataclasses
from typing import Any

from dflash.core.draft_config import DraftConfig
from dflash.core.eagle3_config import NO_MASK, Eagle3Config
from tests.core.draft_folders import H, Tensors, V

K = 40
"""Rows of the reduced head."""
LAYER: dict[str, Any] = {
    "hidden_size": H,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "vocab_size": V,
}
SAFEAILAB: dict[str, Any] = {
    **LAYER,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "draft_vocab_size": K,
}
"""As eagle/traineagle3/config.json: no taps, no rotary base, no width of a head."""
SPECFORGE = {**SAFEAILAB, "architectures": ["LlamaForCausalLMEagle3"], "rope_theta": 1e6, "head_dim": 8} | {
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32], "use_aux_hidden_state": True}
}


def speculators(**changes: Any) -> dict[str, Any]:
    inner = {**LAYER, "model_type": "llama", "head_dim": 8, "rope_theta": 1e6, "tie_word_embeddings": True}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [method]},
        "transformer_layer_config": inner,
        "draft_vocab_size": K,
        "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
        "norm_before_residual": True,
        "tie_word_embeddings": False,
        **changes,
    }


def held(layer: str = "midlayer", **changes: Any) -> Tensors:
    """Tensors of one layer; None takes one out."""
    shapes: dict[str, tuple[int, ...] | None] = {
        "fc.weight": (H, 3 * H),
        "norm.weight": (H,),
        "lm_head.weight": (K, H),
        f"{layer}.hidden_norm.weight": (H,),
        f"{layer}.input_layernorm.weight": (H,),
        f"{layer}.post_attention_layernorm.weight": (H,),
        f"{layer}.self_attn.q_proj.weight": (32, 2 * H),
        f"{layer}.self_attn.k_proj.weight": (16, 2 * H),
        f"{layer}.self_attn.v_proj.weight": (16, 2 * H),
        f"{layer}.self_attn.o_proj.weight": (H, 32),
        f"{layer}.mlp.gate_proj.weight": (48, H),
        f"{layer}.mlp.up_proj.weight": (48, H),
        f"{layer}.mlp.down_proj.weight": (H, 48),
    }
    shapes |= {name.replace("__", "."): shape for name, shape in changes.items()}
    tables: Tensors = {"d2t": ("I64", (K,)), "t2d": ("BOOL", (V,))}
    kept = {name: value for name, value in tables.items() if changes.get(name, 1) is not None}
    return {name: ("F16", shape) for name, shape in shapes.items() if shape is not None and name not in tables} | kept


EXPECTED = Eagle3Config(
    **LAYER,
    head_dim=8,
    rope_theta=1e4,
    block_size=8,
    mask_token_id=NO_MASK,
    target_layer_ids=(),
    draft_vocab_size=K,
    owns_head=True,
)

WHOLE = dataclasses.replace(EXPECTED, draft_vocab_size=None)
FULL_HEAD: dict[str, Any] = {"lm_head__weight": (V, H), "d2t": None, "t2d": None}
EAGLE3_CASES: dict[str, tuple[str, dict[str, Any], Tensors, DraftConfig]] = {
    "eagle3": ("eagle3", SAFEAILAB | {"draft_vocab_size": V}, held(**FULL_HEAD), WHOLE),
    "eagle3 of SpecForge": (
        "eagle3",
        SPECFORGE | {"draft_vocab_size": V},
        held(**FULL_HEAD),
        dataclasses.replace(WHOLE, target_layer_ids=(1, 17, 32), rope_theta=1e6),
    ),
    "speculators eagle3": (
        "speculators-eagle3",
        speculators(draft_vocab_size=V),
        held("layers.0", **FULL_HEAD),
        dataclasses.replace(
            WHOLE, target_layer_ids=(1, 17, 32), rope_theta=1e6, block_size=4, norm_before_residual=True
        ),
    ),
}
"""With whole vocabularies."""
