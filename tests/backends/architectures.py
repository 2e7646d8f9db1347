"""Tiny random models of real Transformers classes, one per family that a target may come from: float32, CPU.

Each row says what the family adds to a plain decoder. Small enough that the whole matrix runs in a minute: two to four
layers, windows of 8, latents of 16; large enough in scale (initializer_range) that greedy answers vary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

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
        "max_position_embeddings": MAX_LENGTH,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,  # tied ones make small models repeat themselves
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
)
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
_WILD = {"initializer_range": 0.5}
_TWO_KINDS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Architecture:
    """One family of targets."""

    config: str
    """Name of the configuration class of the language model."""
    model: str
    """Name of the model class."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """On top of the small values that all share."""
    refused: str | None = None
    """Part of the reason with which the family is refused at load; None = it must decode losslessly."""

    def build(self) -> PreTrainedModel:
        """A fresh model with the same random weights each time."""
        values = {**_SMALL, **self.changes}
        model_class = getattr(transformers, self.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: PreTrainedModel = model_class(getattr(transformers, self.config)(**values))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("sinks", "e_score_correction_bias")):  # zero or unset by default
                    parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
        model.eval()
        return model


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "Llama": Architecture("LlamaConfig", "LlamaForCausalLM"),
        "Mistral": Architecture("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
        "Phi": Architecture("PhiConfig", "PhiForCausalLM"),
        "Phi-3": Architecture("Phi3Config", "Phi3ForCausalLM", {"sliding_window": WINDOW, "num_key_value_heads": 4}),
        "SmolLM3": Architecture("SmolLM3Config", "SmolLM3ForCausalLM", {"num_hidden_layers": 4}),
        "Qwen2": Architecture(
            "Qwen2Config",
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        ),
        "Qwen3": Architecture("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
        "Qwen3-MoE": Architecture("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"head_dim": 16, **_EXPERTS, **_WILD}),
        "Qwen3-Next": Architecture(
            "Qwen3NextConfig",
            "Qwen3NextForCausalLM",
            {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
        ),
        "Qwen3.5": Architecture("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _DELTA),
        "Qwen3.5-MoE": Architecture(
            "Qwen3_5MoeTextConfig",
            "Qwen3_5MoeForCausalLM",
            {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
        ),
        "Gemma": Architecture("GemmaConfig", "GemmaForCausalLM", {"head_dim": 8}),
        "Gemma 2": Architecture("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 8, **_TWO_KINDS}),
        "Gemma 3": Architecture("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 8, **_TWO_KINDS}),
        "Gemma 3n": Architecture(
            "Gemma3nTextConfig",
            "Gemma3nForCausalLM",
            {
                "head_dim": 8,
                "num_hidden_layers": 4,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCAB_SIZE,
                "hidden_size_per_layer_input": 8,
                "laurel_rank": 4,
                "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                "altup_num_inputs": 2,
                "pad_token_id": 0,
            },
        ),
        "Gemma 4": Architecture(
            "Gemma4TextConfig",
            "Gemma4ForCausalLM",
            {
                "head_dim": 8,
                "num_hidden_layers": 4,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCAB_SIZE,
                "hidden_size_per_layer_input": 8,
                "pad_token_id": 0,
            },
        ),
        "gpt-oss": Architecture(
            "GptOssConfig",
            "GptOssForCausalLM",
            {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **_TWO_KINDS},
        ),
        "MiniMax-M2": Architecture(
            "MiniMaxM2Config",
            "MiniMaxM2ForCausalLM",
            {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
        ),
        "DeepSeek-V3, Kimi-K2": Architecture(
            "DeepseekV3Config", "DeepseekV3ForCausalLM", {**_LATENT, **_ROUTED, **_WILD}
        ),
        "Kimi-Linear": Architecture(
            "KimiLinearConfig",
            "KimiLinearForCausalLM",
            {
                **_LATENT,
                "num_hidden_layers": 3,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "num_local_experts": 4,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "linear_head_dim": 8,
                "linear_num_heads": 4,
            },
        ),
        "GLM-4-MoE": Architecture("Glm4MoeConfig", "Glm4MoeForCausalLM", {**_ROUTED, "head_dim": 8}),
        "GLM-MoE-DSA": Architecture(
            "GlmMoeDsaConfig",
            "GlmMoeDsaForCausalLM",
            {
                **_LATENT,
                **_ROUTED,
                "num_hidden_layers": 3,
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "index_topk": 6,
                "index_head_dim": 16,
                "index_n_heads": 4,
            },
        ),
        "LFM2": Architecture(
            "Lfm2Config",
            "Lfm2ForCausalLM",
            {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
        ),
        "Granite 4": Architecture(
            "GraniteMoeHybridConfig",
            "GraniteMoeHybridForCausalLM",
            {
                "num_hidden_layers": 3,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "num_local_experts": 4,
                "shared_intermediate_size": 16,
                "mamba_n_heads": 8,
                "mamba_d_head": 8,
                "mamba_d_state": 8,
                "mamba_chunk_size": 16,
            },
        ),
        "Llama 4": Architecture(
            "Llama4TextConfig",
            "Llama4ForCausalLM",
            {
                "head_dim": 8,
                "num_hidden_layers": 4,
                "attention_chunk_size": WINDOW,
                "intermediate_size_mlp": 48,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "no_rope_layers": [1, 1, 1, 0],
            },
        ),
        "Qwen2-MoE": Architecture(
            "Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**_EXPERTS, "shared_expert_intermediate_size": 16}
        ),
        "MiniMax-M3": Architecture(
            "MiniMaxM3VLTextConfig",
            "MiniMaxM3VLForCausalLM",
            {
                "head_dim": 8,
                "layer_types": ["full_attention", "minimax_m3_sparse"],
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "intermediate_size": 16,
                "dense_intermediate_size": 48,
                "shared_intermediate_size": 16,
                "rotary_dim": 4,
                "index_head_dim": 8,
                "index_n_heads": 2,
                "index_block_size": 4,
                "index_topk_blocks": 2,
            },
        ),
        "DeepSeek-V3.2": Architecture(
            "DeepseekV32Config",
            "DeepseekV32ForCausalLM",
            {
                **_LATENT,
                **_ROUTED,
                "mlp_layer_types": ["dense", "sparse"],
                "index_topk": 6,
                "index_head_dim": 16,
                "index_n_heads": 4,
            },
        ),
        "Falcon-H1": Architecture(
            "FalconH1Config",
            "FalconH1ForCausalLM",
            {
                "mamba_d_ssm": 64,
                "mamba_n_heads": 8,
                "mamba_d_head": 8,
                "mamba_d_state": 8,
                "mamba_n_groups": 1,
                "mamba_chunk_size": 16,
            },
        ),
        "Mamba-2": Architecture(
            "Mamba2Config",
            "Mamba2ForCausalLM",
            {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 16},
        ),
        "MiniMax-Text-01": Architecture(
            "MiniMaxConfig",
            "MiniMaxForCausalLM",
            {
                "num_hidden_layers": 3,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "block_size": 8,
            },
        ),
        "Qwen4-exp": Architecture(
            "Qwen4ExpTextConfig",
            "Qwen4ExpForCausalLM",
            {
                **_DELTA,
                **_EXPERTS,
                "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
                "indexer_n_heads": 2,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 16,
                "indexer_budget": 8,
                "indexer_compress_ratio": 4,
            },
            refused="the indexer of qwen4_exp_text keeps the positions",
        ),
        "DeepSeek-V4": Architecture("DeepseekV4Config", "DeepseekV4ForCausalLM", refused="DeepseekV4HCACache"),
    }
)

LOSSLESS = [name for name, family in ARCHITECTURES.items() if family.refused is None]
REFUSED = [name for name, family in ARCHITECTURES.items() if family.refused is not None]


def base_values(family: str) -> dict[str, Any]:
    """Configuration of the family's language model, to be put into a wrapper."""
    return {**_SMALL, **ARCHITECTURES[family].changes}


SHARED: dict[str, PreTrainedModel] = {}
"""Family -> its tiny model, where a test has asked for it."""


def model_of(family: str) -> PreTrainedModel:
    """The family's tiny model; shared by all tests, which must leave it as it is."""
    if family not in SHARED:
        SHARED[family] = ARCHITECTURES[family].build()
    return SHARED[family]


def tokens(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()
    return ids
