"""The draft network in MLX (arXiv:2602.06036), for inference; tested against `backends/torch/draft_model.py`.

Knows the mathematics of one block given the states that hold its context; does not know embeddings' owner, sampling or
how states grow. Parameter names are those of published checkpoints (`core/draft_tensors.py`).

Shape letters: B slots, S context rows, H hidden, F taps x hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from dflash.backends.mlx.draft_attention import Attention, block_mask
from dflash.backends.mlx.draft_heads import CandidateSelector, ConfidenceHead, DynamicConvolution, MarkovHead
from dflash.backends.mlx.states.keyvalue import KeyValueState
from dflash.core.draft_config import DraftConfig, LayerAttention


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """One draft layer; only block rows pass through it, context rows enter as keys and values."""

    def __init__(self, config: DraftConfig, number: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, number)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.convolved = config.conv_kernel_size > 0
        if self.convolved:
            self.attention_conv = DynamicConvolution(config)
            self.mlp_conv = DynamicConvolution(config)

    def __call__(self, x_BH: mx.array, state: KeyValueState, mask: mx.array | None) -> mx.array:
        """Pass block rows through; DFlash 2 convolves them before and behind each sublayer."""
        u_BH = self.input_layernorm(x_BH)
        if self.convolved:
            kernels = self.attention_conv.kernels(u_BH)
            mixed = self.self_attn(self.attention_conv(u_BH, kernels, 0), state, mask)
            x_BH = x_BH + self.attention_conv(mixed, kernels, 1)
        else:
            x_BH = x_BH + self.self_attn(u_BH, state, mask)
        u_BH = self.post_attention_layernorm(x_BH)
        if not self.convolved:
            out: mx.array = x_BH + self.mlp(u_BH)
            return out
        kernels = self.mlp_conv.kernels(u_BH)
        out = x_BH + self.mlp_conv(self.mlp(self.mlp_conv(u_BH, kernels, 0)), kernels, 1)
        return out


class DraftModel(nn.Module):
    """The whole draft network."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.vocabulary: tuple[int, ...] | None = None
        """Target ids that the draft scores (ascending); None = all of the head."""
        self.fc = nn.Linear(config.fc_in_features, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [DraftLayer(config, number) for number in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.owns_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.owns_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size or config.vocab_size, bias=False)
        if config.selector_rank:
            self.candidate_selector = CandidateSelector(config)
        if config.markov_rank:
            self.markov_head = MarkovHead(config)
        if config.confidence_head:
            self.confidence_head = ConfidenceHead(config)

    def write_context(self, features_SF: mx.array, states: Sequence[KeyValueState]) -> None:
        """Keys and values of context rows, from the concatenated taps, go into every layer's state."""
        fused_SH = self.hidden_norm(self.fc(features_SF))
        for layer, state in zip(self.layers, states, strict=True):
            layer.self_attn.write(fused_SH, state)

    def __call__(self, embedded_BH: mx.array, states: Sequence[KeyValueState]) -> mx.array:
        """Embedded slots (slot 0 = anchor, others = mask, unscaled) to final normed hidden states [B, H]; slot i >= 1
        predicts the token at the anchor's position + i (+ i + 1, slot 0 as well, where the anchor slot predicts)."""
        config = self.config
        x_BH = embedded_BH
        if config.input_embedding_scale != 1:
            x_BH = x_BH * config.input_embedding_scale
        masks: dict[tuple[LayerAttention, int | None], mx.array | None] = {}
        for number, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            kind = config.attention_of(number), state.window
            if kind not in masks:
                masks[kind] = block_mask(*kind, state.span.start, len(x_BH))
            x_BH = layer(x_BH, state, masks[kind])
        out: mx.array = self.norm(x_BH)
        return out

    def finish_logits(self, logits: mx.array) -> mx.array:
        """Multiplier and cap of this draft, applied to what the head gave (any shape)."""
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else mx.tanh(logits / cap) * cap
