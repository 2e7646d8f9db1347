"""The EAGLE-3 network in MLX (arXiv:2503.01840 §3): a decoder layer over pairs of an embedding and a hidden state.

Tested against `backends/torch/eagle3_model.py`. Row r stands for the token at position r + 1 and what the target knew
at position r. A row's place among the keys is where the states' span starts. Knows nothing of sessions, embeddings'
owner, or vocabularies.

Shape letters: R rows, H hidden, I inputs of a projection, F features (taps x width).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from dflash.backends.mlx.draft_attention import Rotary
from dflash.backends.mlx.draft_model import MLP
from dflash.backends.mlx.states.keyvalue import KeyValueState
from dflash.core.eagle3_config import Eagle3Config, llama3_frequencies


class Eagle3Attention(nn.Module):
    """Grouped-query attention of a few rows over the kept ones and one another."""

    def __init__(self, config: Eagle3Config, *, num_inputs: int) -> None:
        super().__init__()
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, width
        self.q_proj = nn.Linear(num_inputs, heads * width, bias=config.attention_bias)
        self.k_proj = nn.Linear(num_inputs, kv_heads * width, bias=config.attention_bias)
        self.v_proj = nn.Linear(num_inputs, kv_heads * width, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = nn.RMSNorm(width, eps=config.rms_norm_eps) if config.head_norms else None
        self.k_norm = nn.RMSNorm(width, eps=config.rms_norm_eps) if config.head_norms else None
        self._rotary = rotary_of(config)

    def keep(self, x_RI: mx.array, state: KeyValueState, *, in_one_place: bool) -> tuple[mx.array, mx.array]:
        """Write the rows' keys and values; returns all that the state holds, [1, kv heads, keys, D] each.
        `in_one_place`: the rows are alternatives for one position, else they follow each other."""
        keys = self._turned(self.k_proj(x_RI), self.k_norm, self.num_kv_heads, state, in_one_place)
        stored_keys, stored_values = state.update_and_fetch(keys, self._split(self.v_proj(x_RI), self.num_kv_heads))
        assert isinstance(stored_keys, mx.array) and isinstance(stored_values, mx.array)
        return stored_keys, stored_values

    def __call__(
        self, x_RI: mx.array, state: KeyValueState, mask: mx.array | str | None, *, first: int, in_one_place: bool
    ) -> mx.array:
        """Keep the rows and attend to the keys from `first` on; [R, H]. `mask`: bool [R, keys], "causal" or None."""
        keys, values = self.keep(x_RI, state, in_one_place=in_one_place)
        queries = self._turned(self.q_proj(x_RI), self.q_norm, self.num_heads, state, in_one_place)
        mixed = mx.fast.scaled_dot_product_attention(
            queries, keys[:, :, first:], values[:, :, first:], scale=self.head_dim**-0.5, mask=mask
        )
        out: mx.array = self.o_proj(mixed[0].transpose(1, 0, 2).reshape(len(x_RI), -1))
        return out

    def _turned(
        self, rows: mx.array, norm: nn.RMSNorm | None, num_heads: int, state: KeyValueState, in_one_place: bool
    ) -> mx.array:
        """Projected rows as heads [1, heads, R, D], normed and rotated."""
        heads = self._split(rows, num_heads)
        if norm is not None:
            heads = norm(heads)
        if in_one_place:  # as a batch of single rows
            return self._rotary(heads.swapaxes(0, 2), state.span.start).swapaxes(0, 2)
        return self._rotary(heads, state.span.start)

    def _split(self, rows: mx.array, num_heads: int) -> mx.array:
        """[R, heads x D] -> [1, heads, R, D]."""
        return rows.reshape(1, len(rows), num_heads, self.head_dim).transpose(0, 2, 1, 3)


class Eagle3Layer(nn.Module):
    """The first layer reads two states side by side; further ones are ordinary decoder layers."""

    def __init__(self, config: Eagle3Config, number: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps) if number == 0 else None
        self.self_attn = Eagle3Attention(config, num_inputs=hidden if number else 2 * hidden)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def inputs(self, embedded_RH: mx.array, x_RH: mx.array) -> tuple[mx.array, mx.array]:
        """What attention reads [R, I], and the residual [R, H]."""
        if self.hidden_norm is None:
            return self.input_layernorm(x_RH), x_RH
        normed_RH = self.hidden_norm(x_RH)
        paired = mx.concatenate([self.input_layernorm(embedded_RH), normed_RH], axis=-1)
        return paired, normed_RH if self.norm_before_residual else x_RH

    def __call__(
        self,
        embedded_RH: mx.array,
        x_RH: mx.array,
        state: KeyValueState,
        mask: mx.array | str | None,
        *,
        first: int = 0,
        in_one_place: bool = False,
    ) -> mx.array:
        """[R, H], before any norm."""
        inputs_RI, residual_RH = self.inputs(embedded_RH, x_RH)
        x_RH = residual_RH + self.self_attn(inputs_RI, state, mask, first=first, in_one_place=in_one_place)
        out: mx.array = x_RH + self.mlp(self.post_attention_layernorm(x_RH))
        return out


class Eagle3Model(nn.Module):
    """Fusion of the taps, the layers, the norm before the head; embedding and head where the checkpoint has its own."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.vocabulary: tuple[int, ...] | None = None
        """Target ids that the head scores, ascending; None = all."""
        hidden, eps, features = config.hidden_size, config.rms_norm_eps, config.fc_in_features
        self.fc = nn.Linear(features, hidden, bias=False)
        self.input_norm = nn.RMSNorm(features, eps=eps) if config.fused_norm == "whole" else None
        num_taps = features // config.tap_width
        each = config.fused_norm == "each"
        self.fc_norm = [nn.RMSNorm(config.tap_width, eps=eps) for _ in range(num_taps)] if each else None
        self.layers = [Eagle3Layer(config, number) for number in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(hidden, eps=eps)
        if config.owns_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        if config.owns_head:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size or config.vocab_size, bias=False)

    def fuse(self, features_RF: mx.array) -> mx.array:
        """One state [R, H] from the taps of each row, concatenated in their order."""
        if self.input_norm is not None:
            features_RF = self.input_norm(features_RF)
        if self.fc_norm is not None:
            parts = mx.split(features_RF, len(self.fc_norm), axis=-1)
            features_RF = mx.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], axis=-1)
        fused: mx.array = self.fc(features_RF)
        return fused

    def extend(self, embedded_RH: mx.array, fused_RH: mx.array, states: Sequence[KeyValueState]) -> None:
        """Keep committed rows at the span's start and behind it; of the last layer only what later rows see of them is
        computed."""
        x_RH = fused_RH
        for layer, state in zip(self.layers[:-1], states, strict=False):
            x_RH = layer(embedded_RH, x_RH, state, "causal")
        last = self.layers[-1]
        last.self_attn.keep(last.inputs(embedded_RH, x_RH)[0], states[-1], in_one_place=False)

    def step(self, embedded_RH: mx.array, x_RH: mx.array, states: Sequence[KeyValueState], first: int) -> mx.array:
        """R alternatives for one place of a chain, the span's start: output [R, H], before the norm.

        Each sees the kept rows from `first` on and itself. The first one's keys and values stay in that place; the
        others lie behind it, where the next step writes.
        """
        num_rows = len(x_RH)
        mask = None
        if num_rows > 1:
            before = mx.ones((num_rows, states[0].span.start - first), dtype=mx.bool_)
            mask = mx.concatenate([before, mx.eye(num_rows, dtype=mx.bool_)], axis=1)
        for layer, state in zip(self.layers, states, strict=True):
            x_RH = layer(embedded_RH, x_RH, state, mask, first=first, in_one_place=True)
        return x_RH


def rotary_of(config: Eagle3Config) -> Rotary:
    """The rotary embedding, with the scalings that EAGLE-3 checkpoints know."""
    if config.llama3 is None:
        return Rotary(config, 0, scale=1 / config.rope_factor)
    frequencies = llama3_frequencies(config.rope_theta, config.head_dim, config.llama3)
    return Rotary(config, 0, periods=mx.array(1 / frequencies))
