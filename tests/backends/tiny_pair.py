"""A target and drafts small enough to load from disk in a test: random Llama, byte tokenizer, DFlash v1 drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.target import TorchTarget
from dflash.core.draft_config import CONFIG_FILE, WEIGHTS_FILE, DraftConfig

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|mask|>")
END, USER, ASSISTANT, MASK = range(256, 256 + len(SPECIAL))
VOCAB = 256 + len(SPECIAL)
HIDDEN = 32
NUM_LAYERS = 3
CONTEXT = 640
"""More than one bucket of 512 keys."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('role ' + m.role) }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


DRAFT_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
}
"""Of a draft's layers, whatever kind of draft it is."""


def draft_config(**changes: Any) -> DraftConfig:
    """Block 8, two layers, taps at the first and last layer of the target."""
    values: dict[str, Any] = {
        **DRAFT_SIZES,
        "num_hidden_layers": 2,
        "block_size": 8,
        "mask_token_id": MASK,
        "target_layer_ids": (0, 2),
        "num_target_layers": NUM_LAYERS,
    }
    return DraftConfig(**{**values, **changes})


def save_target(folder: Path, seed: int = 0, *, template: str | None = TEMPLATE, **changes: Any) -> Path:
    """Write a random float32 Llama with tokenizer; `changes` go to its configuration."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": END,
        "bos_token_id": None,
        "initializer_range": 0.5,  # wide, so that greedy answers vary instead of repeating one token
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**{**values, **changes})).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIAL[0])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def random_draft(config: DraftConfig, seed: int = 1) -> DraftModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DraftModel(config)


def save_draft(folder: Path, network: DraftModel | None = None, *, raw: dict[str, Any] | None = None) -> Path:
    """Write a draft (random by default); `raw` replaces its config.json."""
    network = network or random_draft(draft_config())
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(json.dumps(raw or network.config.to_json()))
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, folder / WEIGHTS_FILE)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change top-level or nested keys of a draft's config.json; None removes a key."""
    path = folder / CONFIG_FILE
    raw = json.loads(path.read_text())
    for key, value in changes.items():
        level = raw["dflash_config"] if key in raw["dflash_config"] else raw
        if value is None:
            del level[key]
        else:
            level[key] = value
    path.write_text(json.dumps(raw))


def train_draft(
    network: DraftModel, target: TorchTarget, texts: Sequence[tuple[Sequence[int], Sequence[int]]], steps: int = 60
) -> None:
    """Overfit `network` on (prompt, answer) pairs of `target`: every answer position is an anchor, plain CE."""
    config = network.config
    batches = []
    for prompt, answer in texts:
        ids = torch.tensor([*prompt, *answer])
        session = target.session()
        features = session.prefill(ids.tolist()).features.clone()[None]
        session.close()
        anchors = torch.arange(len(prompt), len(ids) - config.block_size)
        slots = anchors[:, None] + torch.arange(config.block_size)
        blocks = ids[slots].clone()
        blocks[:, 1:] = config.mask_token_id
        hidden = torch.arange(len(ids))[None, :] >= anchors[:, None]
        bias = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[None]
        with torch.no_grad():
            embedded = target.embed_tokens(blocks)[None].clone()
        batches.append((features, embedded, anchors[None], bias, ids[slots[:, 1:]]))
    head = target.head_weight.detach().clone()
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3)
    for _ in range(steps):
        for features, embedded, anchors, bias, labels in batches:
            positions = torch.arange(features.shape[1])[None]
            contexts = network.project_context(features, positions)
            logits = network(embedded, anchors, contexts, bias)[0, :, 1:] @ head.T
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
