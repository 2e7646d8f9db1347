"""Tiny random Transformers models for the tests of the torch backend: float32, CPU, a few layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 97
NUM_LAYERS = 3
MAX_LENGTH = 2048


def llama(max_length: int = MAX_LENGTH) -> PreTrainedModel:
    """Llama: three query heads per key/value head, tied embeddings, as in SmolLM2."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,  # heads of 16: with 8, attention kernels have no width class
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return _random(LlamaForCausalLM, config)


def qwen2(max_length: int = MAX_LENGTH) -> PreTrainedModel:
    """Qwen2: biases on q, k and v."""
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        initializer_range=0.2,
    )
    return _random(Qwen2ForCausalLM, config)


def qwen3(max_length: int = MAX_LENGTH) -> PreTrainedModel:
    """Qwen3: q/k-norm, a head dimension that is not hidden / heads, as many key/value heads as query heads."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=max_length,
        initializer_range=0.2,
    )
    return _random(Qwen3ForCausalLM, config)


FAMILIES: Mapping[str, Callable[[], PreTrainedModel]] = MappingProxyType(
    {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}
)


def tokens(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
    return ids


def _random(model_class: Callable[[Any], PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
    model.eval()
    return model
