"""EAGLE-3 drafts small enough for tests: random, trained on a target's own answers, and such that never guess right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from dflash.backends.torch.eagle3_model import Eagle3Layer, Eagle3Model, Fed, KeptRows
from dflash.backends.torch.target import TorchTarget
from dflash.core.eagle3_config import NO_MASK, Eagle3Config
from tests.backends import tiny_pair

TAPS = (0, 1, 2)


def eagle3_config(**changes: Any) -> Eagle3Config:
    """One layer, of the sizes of `tiny_pair`, for a target of three layers."""
    values: dict[str, Any] = {
        **tiny_pair.DRAFT_SIZES,
        "num_hidden_layers": 1,
        "block_size": 6,
        "mask_token_id": NO_MASK,
        "target_layer_ids": TAPS,
        "owns_head": True,
    }
    return Eagle3Config(**{**values, **changes})


def random_eagle3(config: Eagle3Config, seed: int = 1, *, ids: Sequence[int] | None = None) -> Eagle3Model:
    """Random weights, none at a value that would hide a part: norms off one, biases off zero."""
    network = Eagle3Model(config).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.3 * noise if "norm" in name else noise * 0.25)
    network.vocabulary = None if ids is None else tuple(ids)
    return network


def train_eagle3(
    network: Eagle3Model, target: TorchTarget, texts: Sequence[tuple[Sequence[int], Sequence[int]]], steps: int = 50
) -> None:
    """Overfit `network` on (prompt, answer) pairs of `target`: the first step of a chain, at every place of a text.

    Features of position r and the token at r + 1 predict the token at r + 2.
    """
    network.requires_grad_(True)
    layer = network.layers[0]
    assert isinstance(layer, Eagle3Layer)
    assert network.lm_head is not None
    embedding_VH = target.embed_weight.detach().clone()
    batches = []
    for prompt, answer in texts:
        ids = torch.tensor([*prompt, *answer])
        session = target.session()
        features = session.prefill(ids.tolist()).features.clone()
        session.close()
        batches.append((ids, features, len(prompt)))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(steps):
        for ids, features, start in batches:
            rows = len(ids) - 2
            shape = (network.config.num_key_value_heads, rows, network.config.head_dim)
            kept = KeptRows(torch.zeros(shape), torch.zeros(shape))
            rotary = network.rotary(torch.arange(rows), torch.float32)
            causal = torch.ones(rows, rows, dtype=torch.bool).tril()
            out = layer(embedding_VH[ids[1:-1]], network.fuse(features[:-2]), rotary, kept, Fed(0, causal))
            logits = network.lm_head(network.norm(out))[start - 2 :]
            loss = F.cross_entropy(logits, ids[start:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.requires_grad_(False)


def safeailab(config: Eagle3Config, **changes: Any) -> dict[str, Any]:
    """The config.json of SafeAILab's training (eagle/traineagle3/config.json), which lists no taps."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": 2048,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        **changes,
    }


def speculators(config: Eagle3Config, **changes: Any) -> dict[str, Any]:
    """What Speculators writes for an EAGLE-3 draft: the layer's keys nested, ids of what enters a layer."""
    layer = {
        "model_type": "qwen3" if config.head_norms else "llama",
        "attention_bias": config.attention_bias,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": True,  # copied from the target; says nothing about the draft
        "vocab_size": config.vocab_size,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.max_proposal}],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids] or None,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.fused_norm == "whole",
        "fc_norm": config.fused_norm == "each",
        "norm_output": config.feeds_normed,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        **changes,
    }


def tensors_of(network: Eagle3Model) -> dict[str, Tensor]:
    """All tensors by Speculators' names, tables of a reduced vocabulary included."""
    held = {name: tensor.contiguous().clone() for name, tensor in network.state_dict().items()}
    if network.vocabulary is not None:
        ids = torch.tensor(network.vocabulary)
        kept = torch.zeros(network.config.vocab_size, dtype=torch.bool)
        kept[ids] = True
        held |= {"d2t": ids - torch.arange(len(ids)), "t2d": kept}
    return held


def save_eagle3(
    folder: Path, network: Eagle3Model, raw: dict[str, Any], *, midlayer: bool = False, without: Sequence[str] = ()
) -> Path:
    """Write a draft's folder; `midlayer`: SafeAILab's name of the layer; `without`: tensors to leave out."""
    held = {name: tensor for name, tensor in tensors_of(network).items() if name not in without}
    if midlayer:
        held = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in held.items()}
    folder.mkdir(parents=True)
    save_file(held, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder
