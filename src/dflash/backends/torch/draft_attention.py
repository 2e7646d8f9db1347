"""Attention of block rows over context rows and their own block, with everything that dialects vary: windows,
causality in the block, sinks, biases, rotary bases, YaRN and pair order.

Shape letters: N sequences, A blocks (anchors) per sequence, B slots, S context rows, H hidden, Q query heads, K
key/value heads, D head width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.backends.torch.fused import FusedLinears, packed
from dflash.core.draft_config import DraftConfig, LayerAttention, Yarn


class ContextKV(NamedTuple):
    """Keys (rotated) and values of context rows for one draft layer.

    The last `spare` rows hold nothing yet: an inference block writes its own keys and values there, which saves
    copying the whole context every round.
    """

    keys_NKSD: Tensor
    values_NKSD: Tensor
    spare: int = 0
    first: int = 0
    """Position of the first row: rows that no slot can see any more may be left out."""


class Rotary(NamedTuple):
    """Rotary tables for a set of positions."""

    cos: Tensor  # [..., D] float32 or the network's dtype
    sin: Tensor  # [..., D]
    interleaved: bool = False
    """Pairs are (2d, 2d + 1) instead of (d, d + D/2)."""


class BlockMask(NamedTuple):
    """What is added to attention scores; None = everything is visible."""

    context_NABS: Tensor | None  # B may be 1: the same for all slots
    block_BB: Tensor | None


ALL_VISIBLE = BlockMask(None, None)


def rotary_tables(
    positions: Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    *,
    yarn: Yarn | None = None,
    interleaved: bool = False,
) -> Rotary:
    """cos and sin for absolute `positions` (any shape, integers): [..., D], angles computed in float32."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    frequencies = theta**-exponents
    if yarn is not None:
        frequencies = _stretched(frequencies, head_dim, theta, yarn)
    angles = positions.to(torch.float32)[..., None] * frequencies
    angles = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat([angles, angles], dim=-1)
    cos, sin = angles.cos(), angles.sin()
    if yarn is not None:
        cos, sin = cos * yarn.attention_factor, sin * yarn.attention_factor
    return Rotary(cos.to(dtype), sin.to(dtype), interleaved)


def _stretched(frequencies: Tensor, head_dim: int, theta: float, yarn: Yarn) -> Tensor:
    """YaRN: slow pairs are slowed down by the factor, fast ones stay, in between a linear ramp (arXiv:2309.00071)."""

    def pair_that_turns(times: float) -> float:
        return (
            head_dim * math.log(yarn.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))
        )

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), head_dim - 1)
    pairs = torch.arange(head_dim // 2, device=frequencies.device, dtype=torch.float32)
    slowed = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * slowed + frequencies * (1 - slowed)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the pairs of the last dimension; tables broadcast over heads."""
    if rotary.interleaved:
        turned = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
        return x * rotary.cos + turned * rotary.sin
    first, second = x.chunk(2, dim=-1)
    return x * rotary.cos + torch.cat([-second, first], dim=-1) * rotary.sin


def block_mask(
    layer: LayerAttention,
    anchors_NA: Tensor,  # absolute positions
    context: ContextKV,
    *,
    num_slots: int,
    window_from_anchor: bool,
    bias_NAS: Tensor | None,
) -> BlockMask:
    """The mask of one layer: `bias_NAS` (training: rows from the anchor on are hidden) and the layer's own rules."""
    device = anchors_NA.device
    seen = None if bias_NAS is None else bias_NAS[:, :, None]
    if layer.window is not None:
        rows = context.first + torch.arange(context.keys_NKSD.shape[2] - context.spare, device=device)
        slots = torch.zeros(1, device=device) if window_from_anchor else torch.arange(num_slots, device=device)
        # The row at position p sees t with p - t < W; the other rule has one bound for the block, t >= anchor - W.
        reach = layer.window + 1 if window_from_anchor else layer.window
        distance_NABS = (anchors_NA[..., None] + slots)[..., None] - rows
        hidden = torch.zeros(distance_NABS.shape, device=device).masked_fill(distance_NABS >= reach, -torch.inf)
        seen = hidden if seen is None else seen + hidden
    in_block = None
    if layer.causal:
        in_block = torch.full((num_slots, num_slots), -torch.inf, device=device).triu(1)
    return BlockMask(seen, in_block)


class RMSNorm(nn.RMSNorm):
    """Stays in the dtype of its input (float32 inside), also under autocast, which would widen whatever follows."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


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
        self.q_norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(width, eps=config.rms_norm_eps)
        sinks = config.attention_of(number).sinks
        self.attention_sink_bias = nn.Parameter(torch.zeros(heads)) if sinks else None
        self._fused: FusedLinears | None = None

    def fuse(self, *, packs: bool) -> None:
        """Project block rows by one matmul from now on (fused.py)."""
        self._fused = FusedLinears([self.q_proj, self.k_proj, self.v_proj], packs=packs)
        self.o_proj = packed(self.o_proj) if packs else self.o_proj

    def project_context(self, context_NSH: Tensor, rotary_SD: Rotary) -> ContextKV:
        """K/V of context rows: they depend on the fused features alone, so they are computed once per token."""
        return self.as_context(self.k_proj(context_NSH), self.v_proj(context_NSH), rotary_SD)

    def as_context(self, keys_NSE: Tensor, values_NSE: Tensor, rotary_SD: Rotary) -> ContextKV:
        """Context rows from what the key and value projections gave, E = K * D."""
        n, s, _ = keys_NSE.shape
        keys = self.k_norm(keys_NSE.view(n, s, self.num_kv_heads, self.head_dim)).transpose(1, 2)
        values = values_NSE.view(n, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        return ContextKV(rotate(keys, rotary_SD), values)

    def _project(self, u_NABH: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of block rows."""
        if self._fused is not None:
            return self._fused(u_NABH)
        return self.q_proj(u_NABH), self.k_proj(u_NABH), self.v_proj(u_NABH)

    def forward(self, u_NABH: Tensor, context: ContextKV, rotary: Rotary, mask: BlockMask = ALL_VISIBLE) -> Tensor:
        """`rotary` tables are [N, A, B, 1, D]; `mask` is added to the scores."""
        n, a, b, _ = u_NABH.shape
        projected = self._project(u_NABH)
        queries = rotate(self.q_norm(projected[0].view(n, a, b, self.num_heads, self.head_dim)), rotary)
        keys = rotate(self.k_norm(projected[1].view(n, a, b, self.num_kv_heads, self.head_dim)), rotary)
        values = projected[2].view(n, a, b, self.num_kv_heads, self.head_dim)
        unmasked = mask.context_NABS is None and mask.block_BB is None
        plain = a == 1 and unmasked and self.attention_sink_bias is None
        mixed = (
            _attend_one_block(queries, keys, values, context)
            if plain
            else _attend_blocks(queries, keys, values, context, mask, self.attention_sink_bias)
        )
        out: Tensor = self.o_proj(mixed.reshape(n, a, b, self.num_heads * self.head_dim))
        return out


def _attend_one_block(q_NABQD: Tensor, k_NABKD: Tensor, v_NABKD: Tensor, context: ContextKV) -> Tensor:
    """Inference: one block per sequence, every context row visible; fused attention without a mask."""
    keys, values = context.keys_NKSD, context.values_NKSD
    block_keys, block_values = k_NABKD[:, 0].transpose(1, 2), v_NABKD[:, 0].transpose(1, 2)
    if context.spare:
        assert context.spare == block_keys.shape[2]
        keys[:, :, -context.spare :], values[:, :, -context.spare :] = block_keys, block_values
    else:
        keys, values = torch.cat([keys, block_keys], dim=2), torch.cat([values, block_values], dim=2)
    out = F.scaled_dot_product_attention(q_NABQD[:, 0].transpose(1, 2), keys, values, enable_gqa=True)
    return out.transpose(1, 2)[:, None]


def _attend_blocks(
    q_NABQD: Tensor,
    k_NABKD: Tensor,
    v_NABKD: Tensor,
    context: ContextKV,
    mask: BlockMask,
    sinks_Q: Tensor | None,
) -> Tensor:
    """Training, and inference with a mask: scores against the shared context and against the own block are computed
    apart and normalised together. The dense mask over all blocks would cost A times the in-block work
    (`train/mask.py` is the brute-force definition this is tested against)."""
    n, a, b, heads, d = q_NABQD.shape
    kv_heads = k_NABKD.shape[3]
    s = context.keys_NKSD.shape[2] - context.spare
    keys_NKSD, values_NKSD = context.keys_NKSD[:, :, :s], context.values_NKSD[:, :, :s]
    group = heads // kv_heads
    q_NKARD = (q_NABQD * d**-0.5).view(n, a, b, kv_heads, group, d).permute(0, 3, 1, 2, 4, 5).flatten(3, 4)
    k_NKABD, v_NKABD = (t.permute(0, 3, 1, 2, 4) for t in (k_NABKD, v_NABKD))
    rows = b * group
    to_context = (q_NKARD.flatten(2, 3) @ keys_NKSD.transpose(-1, -2)).view(n, kv_heads, a, rows, s)
    if mask.context_NABS is not None:
        to_context = to_context + _per_head(mask.context_NABS, group)[:, None].to(to_context.dtype)
    to_block = q_NKARD @ k_NKABD.transpose(-1, -2)
    if mask.block_BB is not None:
        to_block = to_block + _per_head(mask.block_BB, group).to(to_block.dtype)
    scores = [to_context, to_block]
    if sinks_Q is not None:
        sinks = sinks_Q.view(kv_heads, 1, group).expand(kv_heads, b, group).reshape(1, kv_heads, 1, rows, 1)
        scores.append(sinks.to(to_block.dtype).expand(n, -1, a, -1, -1))
    joined = torch.cat(scores, dim=-1)
    weights = joined.softmax(dim=-1, dtype=joined.dtype)  # in float32 inside; the dtype keeps autocast from widening it
    from_context = (weights[..., :s].flatten(2, 3) @ values_NKSD).view(n, kv_heads, a, rows, d)
    mixed = from_context + weights[..., s : s + b] @ v_NKABD
    return mixed.view(n, kv_heads, a, b, group, d).permute(0, 2, 3, 1, 4, 5).reshape(n, a, b, heads, d)


def _per_head(mask: Tensor, group: int) -> Tensor:
    """[..., B, X] -> [..., B * group, X], a slot's row for each of its grouped heads; one row stays one."""
    return mask if mask.shape[-2] == 1 else mask.repeat_interleave(group, dim=-2)
