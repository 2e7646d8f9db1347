"""The draft networks once more, row by row in NumPy float64, from their papers and formats: the specification.

Shares no code with the networks but their weights: one softmax per row over an explicit list of visible rows, rotary as
2 x 2 turns, convolutions as sums over named predecessors, heads as formulas. Slow on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dflash.core.draft_config import DraftConfig

Array = NDArray[np.float64]


def weights_of(state: Mapping[str, Tensor]) -> dict[str, Array]:
    """A network's weights as float64."""
    return {name: value.detach().double().numpy() for name, value in state.items()}


def rms(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / math.sqrt(float((x * x).mean()) + eps) * weight)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def frequencies(config: DraftConfig, theta: float) -> list[float]:
    """Angle per position of each rotary pair; YaRN slows the slow ones down (arXiv:2309.00071, equations 17 to 23)."""
    width, yarn = config.head_dim, config.yarn
    plain = [theta ** (-2 * d / width) for d in range(width // 2)]
    if yarn is None:
        return plain

    def pair(turns: float) -> float:
        return width * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), width - 1)
    slow = [min(max((d - low) / (high - low), 0.0), 1.0) for d in range(width // 2)]
    return [f * (1 - s) + f / yarn.factor * s for f, s in zip(plain, slow, strict=True)]


def turned(x: Array, position: int, config: DraftConfig, theta: float) -> Array:
    """One head's vector [D] at an absolute position."""
    half, out = config.head_dim // 2, x.copy()
    grow = config.yarn.attention_factor if config.yarn else 1.0
    for d, frequency in enumerate(frequencies(config, theta)):
        a, b = (2 * d, 2 * d + 1) if config.rope_interleaved else (d, d + half)
        c, s = grow * math.cos(position * frequency), grow * math.sin(position * frequency)
        out[a], out[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
    return out


def convolved(
    rows: list[Array], inputs: list[Array], name: str, side: int, w: Mapping[str, Array], c: DraftConfig
) -> list[Array]:
    """One side of a dynamic convolution over the block's rows; the kernels come from `inputs`, the normed input."""
    taps, groups = c.conv_kernel_size, c.hidden_size // c.conv_group_size
    base, projection = w[f"{name}.base_kernel"], w[f"{name}.kernel_projection.weight"]
    out = []
    for t in range(len(rows)):
        dynamic = (projection @ inputs[t]).reshape(2, taps, groups)
        mixed = np.zeros(c.hidden_size)
        for tau in range(taps):
            if t - tau >= 0:
                for channel in range(c.hidden_size):
                    kernel = base[side, tau, channel] + dynamic[side, tau, channel // c.conv_group_size]
                    mixed[channel] += kernel * rows[t - tau][channel]
        out.append(mixed)
    return out


def sees(config: DraftConfig, layer: int, anchor: int, slot: int, row: tuple[str, int]) -> bool:
    """Whether slot `slot` of the block at `anchor` may see a context row ("context", t) or a slot ("block", i)."""
    rules = config.attention_of(layer)
    kind, index = row
    if kind == "block":
        return index <= slot or not rules.causal
    if index >= anchor:
        return False
    if rules.window is None:
        return True
    if config.window_from_anchor:
        return index >= anchor - rules.window
    return anchor + slot - index < rules.window


def block_states(config: DraftConfig, w: Mapping[str, Array], features: Array, embedded: Array, anchor: int) -> Array:
    """Final normed states [B, H] of one block: features [S, taps * width] from position 0, embedded slots [B, H]."""
    eps, c = config.rms_norm_eps, config
    fused = [rms(w["fc.weight"] @ row, w["hidden_norm.weight"], eps) for row in features]
    x = [row * c.input_embedding_scale for row in embedded]
    for number in range(c.num_hidden_layers):
        p = f"layers.{number}."
        u = [rms(row, w[p + "input_layernorm.weight"], eps) for row in x]
        entered = convolved(u, u, p + "attention_conv", 0, w, c) if c.conv_kernel_size else u
        mixed = attention(c, w, number, fused, entered, anchor)
        if c.conv_kernel_size:
            mixed = convolved(mixed, u, p + "attention_conv", 1, w, c)
        x = [old + new for old, new in zip(x, mixed, strict=True)]
        u = [rms(row, w[p + "post_attention_layernorm.weight"], eps) for row in x]
        entered = convolved(u, u, p + "mlp_conv", 0, w, c) if c.conv_kernel_size else u
        mixed = []
        for row in entered:
            gate = w[p + "mlp.gate_proj.weight"] @ row
            mixed.append(w[p + "mlp.down_proj.weight"] @ (gate * sigmoid(gate) * (w[p + "mlp.up_proj.weight"] @ row)))
        if c.conv_kernel_size:
            mixed = convolved(mixed, u, p + "mlp_conv", 1, w, c)
        x = [old + new for old, new in zip(x, mixed, strict=True)]
    return np.stack([rms(row, w["norm.weight"], eps) for row in x])


def attention(
    c: DraftConfig, w: Mapping[str, Array], number: int, fused: list[Array], block: list[Array], anchor: int
) -> list[Array]:
    """One attention sublayer for every slot of the block."""
    p, width = f"layers.{number}.self_attn.", c.head_dim
    theta, group = c.rope_theta_of(number), c.num_attention_heads // c.num_key_value_heads

    def heads(row: Array, name: str, position: int | None) -> list[Array]:
        out = w[p + f"{name}_proj.weight"] @ row
        if c.attention_bias:
            out = out + w[p + f"{name}_proj.bias"]
        parts = np.split(out, len(out) // width)
        if position is None:
            return parts
        return [turned(rms(h, w[p + f"{name}_norm.weight"], c.rms_norm_eps), position, c, theta) for h in parts]

    rows: list[tuple[tuple[str, int], int, Array]] = [(("context", t), t, row) for t, row in enumerate(fused)]
    rows += [(("block", i), anchor + i, row) for i, row in enumerate(block)]
    keys = [heads(row, "k", position) for _, position, row in rows]
    values = [heads(row, "v", None) for _, _, row in rows]
    out = []
    for slot, row in enumerate(block):
        visible = [n for n, (name, _, _) in enumerate(rows) if sees(c, number, anchor, slot, name)]
        mixed = []
        for h, query in enumerate(heads(row, "q", anchor + slot)):
            scores = np.array([query @ keys[n][h // group] for n in visible]) / math.sqrt(width)
            if c.attention_of(number).sinks:
                scores = np.append(scores, w[p + "attention_sink_bias"][h])
            chances = np.exp(scores - scores.max())
            chances /= chances.sum()
            mixed.append(sum(chances[k] * values[n][h // group] for k, n in enumerate(visible)))
        result = w[p + "o_proj.weight"] @ np.concatenate([np.asarray(m) for m in mixed])
        out.append(result + w[p + "o_proj.bias"] if c.attention_bias else result)
    return out


def logits_of(config: DraftConfig, states: Array, head: Array) -> Array:
    """Logits [T, rows of head] behind multiplier and cap."""
    logits = np.asarray(states @ head.T * config.output_multiplier)
    cap = config.final_logit_softcapping
    return logits if cap is None else np.asarray(cap * np.tanh(logits / cap))


def selector_walk(w: Mapping[str, Array], states: Array, logits: Array, anchor: int, num_candidates: int) -> list[int]:
    """DFlash 2: S_t(a, b) = U_t(b) + <A[a] * (W_h z_t), B[b]> over the best candidates, greedily."""
    name, before, picked = "candidate_selector.", anchor, []
    for z, u in zip(states, logits, strict=True):
        candidates = sorted(range(len(u)), key=lambda b: -u[b])[:num_candidates]
        code = w[name + "predecessor_codebook"][before] * (w[name + "hidden_projection.weight"] @ z)
        scores = {b: u[b] + code @ w[name + "successor_codebook"][b] for b in candidates}
        before = max(scores, key=lambda b: scores[b])
        picked.append(before)
    return picked


def markov_walk(
    config: DraftConfig, w: Mapping[str, Array], states: Array, logits: Array, anchor: int, ids: Sequence[int]
) -> tuple[list[int], list[float]]:
    """DSpark: tokens (row j of the head is id ids[j]), and the confidence before each; the mask id is never picked."""
    name, before = "markov_head.", anchor
    memory = np.zeros(config.markov_rank)
    picked, trust = [], []
    for h, u in zip(states, logits, strict=True):
        code = w[name + "markov_w1.weight"][before]
        latent = code
        if config.markov_head == "gated":
            gate = w[name + "gate_proj.weight"] @ np.concatenate([h, code]) + w[name + "gate_proj.bias"]
            latent = sigmoid(gate) * code
        if config.markov_head == "rnn":
            joint = w[name + "joint_proj.weight"] @ np.concatenate([memory, code, h]) + w[name + "joint_proj.bias"]
            g, c, o = np.split(joint, 3)
            memory = sigmoid(g) * memory + (1 - sigmoid(g)) * np.tanh(c)
            latent = np.tanh(o)
        scores = u + w[name + "markov_w2.weight"] @ latent
        order = [ids[j] for j in np.argsort(-scores)]
        if config.confidence_head:
            read = np.concatenate([h, code]) if config.confidence_with_markov else h
            value = w["confidence_head.proj.weight"][0] @ read + w["confidence_head.proj.bias"][0]
            trust.append(float(sigmoid(value)))
        before = next(token for token in order if token != config.mask_token_id)
        picked.append(before)
    return picked, trust
