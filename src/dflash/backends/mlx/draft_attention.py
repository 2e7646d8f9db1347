"""Attention of block rows over context rows and their own block, with everything that dialects vary: windows,
causality in the block, sinks, biases, rotary bases, YaRN and pair order. One block per forward; `backends/torch/
draft_attention.py` is what it is tested against.

Shape letters: B slots, S rows, H hidden, Q query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn

from dflash.backends.mlx.states.keyvalue import KeyValueState
from dflash.core.draft_config import DraftConfig, LayerAttention, Yarn


class Rotary:
    """Rotary embedding of one draft layer."""

    def __init__(
        self, config: DraftConfig, number: int, *, scale: float = 1.0, periods: mx.array | None = None
    ) -> None:
        """`scale`: of positions; `periods` [D/2]: instead of those that follow from the configuration."""
        self._width = config.head_dim
        self._interleaved = config.rope_interleaved
        self._theta = config.rope_theta_of(number)
        self._scale = scale
        self._yarn = config.yarn
        self._periods = periods
        if config.yarn is not None:
            self._periods = _stretched_periods(self._width, self._theta, config.yarn)

    def __call__(self, rows: mx.array, offset: int) -> mx.array:
        """Rotate [1, heads, S, D] for the positions offset.. ."""
        if self._yarn is not None:
            rows = rows * self._yarn.attention_factor  # as factor on cos and sin
        return mx.fast.rope(
            rows,
            self._width,
            traditional=self._interleaved,
            base=self._theta if self._periods is None else None,
            scale=self._scale,
            offset=offset,
            freqs=self._periods,
        )


def _stretched_periods(head_dim: int, theta: float, yarn: Yarn) -> mx.array:
    """YaRN: slow pairs are slowed down by the factor, fast ones stay, in between a linear ramp (arXiv:2309.00071).
    Periods [D/2]: MLX divides positions by them."""

    def pair_that_turns(times: float) -> float:
        return (
            head_dim * math.log(yarn.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))
        )

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), head_dim - 1)
    frequencies = theta ** (-mx.arange(0, head_dim, 2, dtype=mx.float32) / head_dim)
    slowed = mx.clip((mx.arange(head_dim // 2, dtype=mx.float32) - low) / max(high - low, 0.001), 0, 1)
    return 1 / (frequencies / yarn.factor * slowed + frequencies * (1 - slowed))


class Attention(nn.Module):
    """Grouped-query attention of block rows over context rows and their own block."""

    def __init__(self, config: DraftConfig, number: int) -> None:
        super().__init__()
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = config.attention_bias
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, width
        self.q_proj = nn.Linear(config.hidden_size, heads * width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(heads * width, config.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        if config.attention_of(number).sinks:
            self.attention_sink_bias = mx.zeros((heads,))
        self._rotary = Rotary(config, number)

    def write(self, rows_SH: mx.array, state: KeyValueState) -> tuple[mx.array, mx.array]:
        """Keys and values of rows go into `state`, at its position; returns all that it holds, [1, K, keys, D] each."""
        keys = self._rotary(self.k_norm(self._split(self.k_proj(rows_SH), self.num_kv_heads)), state.span.start)
        values = self._split(self.v_proj(rows_SH), self.num_kv_heads)
        stored_keys, stored_values = state.update_and_fetch(keys, values)
        assert isinstance(stored_keys, mx.array) and isinstance(stored_values, mx.array)
        return stored_keys, stored_values

    def __call__(self, rows_BH: mx.array, state: KeyValueState, mask: mx.array | None) -> mx.array:
        """`mask` is True where a slot may see a key, [B, keys]; None = everywhere."""
        queries = self._rotary(self.q_norm(self._split(self.q_proj(rows_BH), self.num_heads)), state.span.start)
        keys, values = self.write(rows_BH, state)
        sinks = self.get("attention_sink_bias")
        mixed = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.head_dim**-0.5, mask=mask, sinks=sinks
        )
        out: mx.array = self.o_proj(mixed[0].transpose(1, 0, 2).reshape(len(rows_BH), -1))
        return out

    def _split(self, rows: mx.array, num_heads: int) -> mx.array:
        """[S, heads x D] -> [1, heads, S, D]."""
        return rows.reshape(1, len(rows), num_heads, self.head_dim).transpose(0, 2, 1, 3)


def window_of(config: DraftConfig, number: int) -> int | None:
    """Keys that slot 0 of a block sees at most in this layer, itself included: what its state has to keep."""
    window = config.attention_of(number).window
    return None if window is None else window + config.window_from_anchor


def block_mask(rules: LayerAttention, window: int | None, anchor: int, num_slots: int) -> mx.array | None:
    """The mask of one layer, [B, keys] over the keys that a `KeyValueState` with `window` returns; None = all seen.

    The row at position p sees context rows t with p - t < W; where windows count from the anchor, `window` is one more
    than W and slots do not count. Within the block the window hides nothing.
    """
    first = 0 if window is None else max(0, anchor - window + 1)
    from_anchor = window != rules.window
    if not rules.causal and (window is None or from_anchor or anchor + num_slots - first <= window):
        return None
    slots = mx.arange(num_slots)[:, None]
    keys = mx.arange(first - anchor, num_slots)[None]  # relative to the anchor
    in_block = keys <= slots if rules.causal else mx.array(True)
    near = mx.array(True) if window is None or from_anchor else slots - keys < window
    return mx.where(keys < 0, near, in_block)
