"""Keys that several layouts write alike: what `fields.py` is to reading."""

from __future__ import annotations

from typing import Any

from dflash.core.draft_config import DraftConfig
from dflash.errors import UnsupportedModel


def shape_keys(config: DraftConfig) -> dict[str, Any]:
    """Sizes of the network, under the names that all layouts took over from Qwen3's configuration.

    Raises UnsupportedModel for a draft without a block, which none of the layouts that are written can say.
    """
    if config.kind == "eagle3":
        raise UnsupportedModel(
            "an EAGLE-3 draft cannot be written in a layout of block drafts; use it as it is (vLLM and SGLang read "
            "SafeAILab's and Speculators' layouts, too)."
        )
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
    }


def rope_parameters(config: DraftConfig) -> dict[str, Any]:
    """Rotary embedding as Transformers 5 nests it."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.yarn is not None:
        rope |= {"rope_type": "yarn", **vars(config.yarn)}
    return rope
