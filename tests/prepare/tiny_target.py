"""A target small enough to answer hundreds of prompts per second: random Llama, byte tokenizer, chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from dflash.backends.torch.loading import LoadedTarget

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
END_ID = 256
"""Id of <|end|>: the 256 bytes come first."""
CONTEXT = 256

Loader = Callable[[str, str | None, str | None], LoadedTarget]


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One id per byte, then the special tokens; no pad token, as with many real targets."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(seed: int = 0, *, end_bias: float = 1.0) -> LlamaForCausalLM:
    """A random fp32 Llama; `end_bias` pushes the end token so that answers have different lengths."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256 + len(SPECIAL),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=END_ID,
        bos_token_id=None,
        initializer_range=0.5,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[END_ID] *= 1.0 + end_bias
    model.train(False)
    return model


def tiny_target(model: PreTrainedModel | None = None, tokenizer: PreTrainedTokenizerBase | None = None) -> LoadedTarget:
    """Model and tokenizer as the loader would return them."""
    return LoadedTarget(model or tiny_model(), tokenizer or tiny_tokenizer(), Path())


def loader(model: PreTrainedModel | None = None, tokenizer: PreTrainedTokenizerBase | None = None) -> Loader:
    """A loader for `prepare` that finds the tiny target under any name."""
    return lambda target, dtype, device: tiny_target(model, tokenizer)


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    """Write JSON lines; a row that is text is written as it is (to make bad lines)."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def write_prompts(path: Path, count: int) -> Path:
    """`count` prompts of uneven length."""
    rows = [{"id": f"p{i}", "source": "test", "prompt": "what " * (i * 7 % 5) + f"is {i}?"} for i in range(count)]
    return write_rows(path, rows)
