"""Tiny random models of mlx-lm's own classes, one per family that a target may come from: float32, two to four layers.

Configurations are spelt as in published checkpoints of the family. Windows are 8 tokens, so that a prompt of a dozen
leaves them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

VOCAB_SIZE = 97
WINDOW = 8
MAX_LENGTH = 512

_SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": False,
    }
)
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 16}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_MAMBA = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_proj_bias": False,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
}
_GRANITE = {
    "layer_types": ["mamba", "attention"],
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.25,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "shared_intermediate_size": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_proj_bias": False,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
}


@dataclass(frozen=True)
class Family:
    """One family of targets."""

    module: str
    """In `mlx_lm.models`."""
    changes: Mapping[str, Any]
    """On top of the small values that all share."""
    states: str
    """Kinds of layer state, for the table of docs/mlx.md."""
    refused: str | None = None
    """Part of the reason with which it is refused; None = it must decode losslessly."""
    no_trees: str | None = None
    """Part of the reason why trees are refused; None = they must be fed losslessly."""
    nested: bool = False
    """Whether the language model's values stand in `text_config`."""

    def config(self) -> dict[str, Any]:
        """A config.json."""
        values = {**_SMALL, **self.changes, "model_type": self.module}
        return {"model_type": self.module, "text_config": values} if self.nested else values

    def build(self, seed: int = 0) -> nn.Module:
        """A model with the same random weights each time, wide enough that greedy answers vary."""
        module = importlib.import_module(f"mlx_lm.models.{self.module}")
        model: nn.Module = module.Model(module.ModelArgs.from_dict(self.config()))
        keys = iter(mx.random.split(mx.random.key(seed), 1000))

        def fill(path: str, value: mx.array) -> Any:
            noise: mx.array = mx.random.normal(value.shape, key=next(keys))
            if path.endswith(("A_log", "dt_bias", "D")):
                return noise * 0.3
            if value.ndim == 1:
                return noise * 0.1 + 1 if "norm" in path else noise * 0.3
            return noise * (1.5 / value.shape[-1] ** 0.5)

        model.update(tree_map_with_path(fill, model.parameters()))
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
        return model


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Llama": Family("llama", {}, "full"),
        "Llama with windows": Family(
            "llama", {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}, "window, full"
        ),
        "Qwen3": Family("qwen3", {}, "full"),
        "Qwen3-MoE": Family("qwen3_moe", _EXPERTS, "full"),
        "Qwen3-Next": Family("qwen3_next", {**_DELTA, **_SHARED}, "gated delta, full", no_trees="ArraysCache"),
        "Qwen3.5": Family("qwen3_5", _DELTA, "gated delta, full", nested=True, no_trees="ArraysCache"),
        "Qwen3.5-MoE": Family(
            "qwen3_5_moe", {**_DELTA, **_SHARED}, "gated delta, full", nested=True, no_trees="ArraysCache"
        ),
        "Gemma 2": Family("gemma2", {}, "full"),
        "Gemma 3": Family("gemma3_text", {"sliding_window": WINDOW, "sliding_window_pattern": 2}, "window, full"),
        "Gemma 4": Family(
            "gemma4_text",
            {
                "num_hidden_layers": 4,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCAB_SIZE,
                "hidden_size_per_layer_input": 8,
                "global_head_dim": 16,
            },
            "window, full, shared",
        ),
        "gpt-oss": Family(
            "gpt_oss",
            {
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "window with sinks, full",
        ),
        "Ministral 3": Family(
            "ministral3",
            {
                "rope_parameters": {
                    "rope_theta": 10000.0,
                    "llama_4_scaling_beta": 0.1,
                    "original_max_position_embeddings": 4,
                }
            },
            "full",
        ),
        "LFM2": Family(
            "lfm2",
            {
                "norm_eps": 1e-5,
                "conv_bias": False,
                "conv_L_cache": 3,
                "block_dim": 32,
                "block_ff_dim": 48,
                "block_multiple_of": 8,
                "block_ffn_dim_multiplier": 1.0,
                "block_auto_adjust_ff_dim": False,
                "num_hidden_layers": 3,
                "layer_types": ["conv", "full_attention", "conv"],
            },
            "short convolution, full",
            no_trees="ArraysCache",
        ),
        "MiniMax-M2": Family(
            "minimax",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16, "rotary_dim": 8},
            "full",
        ),
        "GLM-4-MoE": Family(
            "glm4_moe",
            {
                **{k: v for k, v in _LATENT.items() if "lora" not in k},
                "n_group": 1,
                "topk_group": 1,
                "norm_topk_prob": True,
                "routed_scaling_factor": 1.0,
                "rope_scaling": None,
                "use_qk_norm": True,
                "attention_bias": False,
                "partial_rotary_factor": 0.5,
            },
            "full",
        ),
        "DeepSeek-V3, Kimi-K2": Family("deepseek_v3", _LATENT, "latent"),
        "DeepSeek-V3.2": Family(
            "deepseek_v32",
            {**_LATENT, "index_head_dim": 16, "index_n_heads": 4, "index_topk": 6},
            "latent with an indexer's keys",
        ),
        "Kimi-Linear": Family(
            "kimi_linear",
            {
                **_LATENT,
                "num_hidden_layers": 3,
                "num_experts": 4,
                "num_experts_per_token": 2,
                "num_shared_experts": 1,
                "model_max_length": MAX_LENGTH,
                "linear_attn_config": {
                    "kda_layers": [1, 3],
                    "full_attn_layers": [2],
                    "num_heads": 4,
                    "head_dim": 8,
                    "short_conv_kernel_size": 4,
                },
            },
            "gated delta, latent",
            no_trees="ArraysCache",
        ),
        "Nemotron-H": Family(
            "nemotron_h", {**_MAMBA, "hybrid_override_pattern": "M-*M"}, "Mamba-2, full", no_trees="ArraysCache"
        ),
        "Granite 4": Family("granitemoehybrid", _GRANITE, "Mamba-2, full", no_trees="ArraysCache"),
        "Falcon-H1": Family(
            "falcon_h1",
            {
                "mamba_d_ssm": 32,
                "mamba_d_head": 8,
                "mamba_n_heads": 4,
                "mamba_d_state": 16,
                "mlp_multipliers": [1.0, 1.0],
                "ssm_multipliers": [1.0] * 5,
            },
            "Mamba-2 and full in one layer",
            no_trees="ArraysCache",
        ),
        "Llama 4": Family(
            "llama4",
            {
                "attention_bias": False,
                "attention_chunk_size": WINDOW,
                "intermediate_size_mlp": 48,
                "interleave_moe_layer_step": 2,
                "num_experts_per_tok": 1,
                "num_local_experts": 4,
                "rope_scaling": None,
                "use_qk_norm": False,
            },
            "chunks, full",
            refused="ChunkedKVCache",
            nested=True,
        ),
    }
)


def tokens(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    ids: Any = mx.random.randint(0, VOCAB_SIZE, (length,), key=mx.random.key(seed + 1)).tolist()
    return [int(token) for token in ids]
