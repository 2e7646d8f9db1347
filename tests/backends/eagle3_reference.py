"""EAGLE-3 once more, in NumPy float64 and from the paper's description (arXiv:2503.01840): the specification.

No cache, no batches, no masks: a chain is a list of (token, state) pairs, and every step runs the whole list through
the layers again, one row and one head at a time. Shares with the network its weights and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dflash.core.eagle3_config import Eagle3Config

Array = NDArray[np.float64]


class Chain(NamedTuple):
    """A greedy continuation: tokens, and of each slot the log-probabilities [K] of all scored rows."""

    tokens: list[int]
    log_probs: list[Array]


class Reference:
    """The network with the tables that it uses."""

    def __init__(
        self,
        config: Eagle3Config,
        state: Mapping[str, Tensor],
        embedding_VH: Tensor,
        head_KH: Tensor,
        ids: Sequence[int] | None,
    ) -> None:
        self.config = config
        self.weights = {name: value.detach().double().numpy() for name, value in state.items()}
        self.embedding: Array = embedding_VH.detach().double().numpy()
        self.head: Array = head_KH.detach().double().numpy()
        self.ids = list(range(len(self.head))) if ids is None else list(ids)
        self.num_committed, self.first = 0, 0
        self.pairs: list[tuple[int, Array]] = []

    def chain(self, text: Sequence[int], features: Array, anchor: int, length: int, window: int | None = None) -> Chain:
        """`text`: committed tokens; `features` [len(text), taps x width] of them; the anchor follows."""
        after = [*text[1:], anchor]
        pairs = [(token, self.fused(row)) for token, row in zip(after, features, strict=True)]
        # Committed rows see all before them; the anchor's and the chain's see the newest `window` committed ones.
        self.num_committed = len(text) - 1
        self.first = 0 if window is None else max(0, self.num_committed - window)
        tokens: list[int] = []
        log_probs: list[Array] = []
        for _ in range(length):
            output = self.output(pairs)
            log_probs.append(self.scored(output))
            tokens.append(self.ids[int(log_probs[-1].argmax())])
            pairs.append((tokens[-1], self.fed_back(output)))
        self.pairs = pairs
        return Chain(tokens, log_probs)

    def after(self, slot: int, token: int) -> Array:
        """Of the last chain: log-probabilities of slot `slot`, had `token` stood in the slot before."""
        place = self.num_committed + slot
        return self.scored(self.output([*self.pairs[:place], (token, self.pairs[place][1])]))

    def scored(self, output: Array) -> Array:
        logits = self.head @ self.normed(output, "norm")
        shifted = logits - logits.max()
        return np.asarray(shifted - math.log(float(np.exp(shifted).sum())))

    def fed_back(self, output: Array) -> Array:
        return self.normed(output, "norm") if self.config.feeds_normed else output

    def fused(self, row: Array) -> Array:
        """fc of the taps, with the norms that some drafts put before it."""
        width = self.config.tap_width
        if self.config.fused_norm == "whole":
            row = self.normed(row, "input_norm")
        if self.config.fused_norm == "each":
            parts = [row[start : start + width] for start in range(0, len(row), width)]
            row = np.concatenate([self.normed(part, f"fc_norm.{tap}") for tap, part in enumerate(parts)])
        return np.asarray(self.weights["fc.weight"] @ row)

    def output(self, pairs: Sequence[tuple[int, Array]]) -> Array:
        """Output of the last pair."""
        states = [state for _, state in pairs]
        for number in range(self.config.num_hidden_layers):
            states = self.layer(number, pairs, states)
        return states[-1]

    def layer(self, number: int, pairs: Sequence[tuple[int, Array]], states: list[Array]) -> list[Array]:
        name = f"layers.{number}"
        inputs, residuals = [], []
        for (token, _), state in zip(pairs, states, strict=True):
            if number:
                inputs.append(self.normed(state, f"{name}.input_layernorm"))
                residuals.append(state)
                continue
            hidden = self.normed(state, f"{name}.hidden_norm")
            inputs.append(np.concatenate([self.normed(self.embedding[token], f"{name}.input_layernorm"), hidden]))
            residuals.append(hidden if self.config.norm_before_residual else state)
        out = []
        for row in range(len(pairs)):
            middle = residuals[row] + self.attended(f"{name}.self_attn", inputs, row)
            u = self.normed(middle, f"{name}.post_attention_layernorm")
            gate = self.weights[f"{name}.mlp.gate_proj.weight"] @ u
            up = self.weights[f"{name}.mlp.up_proj.weight"] @ u
            out.append(middle + self.weights[f"{name}.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up))
        return out

    def attended(self, name: str, inputs: Sequence[Array], row: int) -> Array:
        config = self.config
        group = config.num_attention_heads // config.num_key_value_heads
        mixed = []
        for head in range(config.num_attention_heads):
            query = self.head_vector(name, "q", inputs[row], head, row)
            seen = range(0 if row < self.num_committed else self.first, row + 1)
            scores = np.array(
                [query @ self.head_vector(name, "k", inputs[at], head // group, at) for at in seen]
            ) / math.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            values = [self.head_vector(name, "v", inputs[at], head // group, at) for at in seen]
            mixed.append(sum(w * v for w, v in zip(weights / weights.sum(), values, strict=True)))
        return self.projected(name, "o", np.concatenate(mixed))

    def head_vector(self, name: str, which: str, x: Array, head: int, position: int) -> Array:
        width = self.config.head_dim
        vector = self.projected(name, which, x)[head * width : (head + 1) * width]
        if which == "v":
            return vector
        if self.config.head_norms:
            vector = self.normed(vector, f"{name}.{which}_norm")
        return self.turned(vector, position)

    def turned(self, x: Array, position: int) -> Array:
        half, out = self.config.head_dim // 2, x.copy()
        for pair in range(half):
            angle = position * self.frequency(pair)
            a, b = (2 * pair, 2 * pair + 1) if self.config.rope_interleaved else (pair, pair + half)
            out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
            out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
        return out

    def frequency(self, pair: int) -> float:
        plain = float(self.config.rope_theta ** (-2 * pair / self.config.head_dim))
        scaling = self.config.llama3
        if scaling is None:
            return plain / self.config.rope_factor
        turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
        if turns < scaling.low_freq_factor:
            return plain / scaling.factor
        if turns > scaling.high_freq_factor:
            return plain
        share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        return share * plain + (1 - share) * plain / scaling.factor

    def projected(self, name: str, which: str, x: Array) -> Array:
        out = self.weights[f"{name}.{which}_proj.weight"] @ x
        bias = self.weights.get(f"{name}.{which}_proj.bias")
        return np.asarray(out if bias is None else out + bias)

    def normed(self, x: Array, name: str) -> Array:
        scale = math.sqrt(float((x * x).mean()) + self.config.rms_norm_eps)
        return np.asarray(x / scale * self.weights[f"{name}.weight"])
