"""The parts that later drafts add to the v1 network: DFlash 2's dynamic convolution and candidate selector, DSpark's
Markov and confidence heads (arXiv:2607.05147). `backends/torch/draft_heads.py` is what they are tested against.

Shape letters: H hidden, G groups of channels, R rank, V vocabulary, C candidates, B slots, T predicting slots.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from dflash.core.draft_config import DraftConfig


class DynamicConvolution(nn.Module):
    """Grouped causal convolution along the slots of a block, its kernels part fixed and part read from the input.

    One projection of the sublayer's normed input serves both sides, before (0) and behind (1) the sublayer.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.num_taps, self.group_size = config.conv_kernel_size, config.conv_group_size
        groups = config.hidden_size // self.group_size
        self.base_kernel = mx.zeros((2, self.num_taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.num_taps * groups, bias=False)

    def kernels(self, u_BH: mx.array) -> mx.array:
        """Dynamic part of the kernels of both sides, [B, 2, taps, G], from the normed input."""
        out: mx.array = self.kernel_projection(u_BH).reshape(len(u_BH), 2, self.num_taps, -1)
        return out

    def __call__(self, v_BH: mx.array, dynamic: mx.array, side: int) -> mx.array:
        """Convolve rows with side `side`'s kernels; nothing lies before the block's first slot."""
        mixed = mx.zeros_like(v_BH)
        for tap in range(self.num_taps):
            kernel = mx.repeat(dynamic[:, side, tap], self.group_size, axis=-1) + self.base_kernel[side, tap]
            earlier = v_BH if tap == 0 else mx.pad(v_BH, [(tap, 0), (0, 0)])[: len(v_BH)]
            mixed = mixed + kernel * earlier
        return mixed


class CandidateSelector(nn.Module):
    """Scores of neighbouring tokens: how well candidate b of a slot goes with its predecessor a.

    S(a, b) = U(b) + <A[a] * (W z), B[b]>, with U the slot's logit and z its final state.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        rank = config.selector_rank
        self.predecessor_codebook = mx.zeros((config.vocab_size, rank))
        self.successor_codebook = mx.zeros((config.vocab_size, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def __call__(self, unary_TC: mx.array, candidates_TC: mx.array, hidden_TH: mx.array, anchor: int) -> mx.array:
        """Scores [T, C, C] of all transitions: [t, a, b] for candidate a of slot t - 1 and b of slot t.

        The predecessor of the first slot is the anchor alone, so all its rows are equal.
        """
        first = mx.full((1, candidates_TC.shape[1]), anchor, dtype=candidates_TC.dtype)
        before_TC = mx.concatenate([first, candidates_TC[:-1]])
        left_TCR = self.predecessor_codebook[before_TC] * self.hidden_projection(hidden_TH)[:, None]
        return unary_TC[:, None] + left_TCR @ self.successor_codebook[candidates_TC].swapaxes(1, 2)


class MarkovHead(nn.Module):
    """Adds to a slot's logits what follows from the token before it: W2 of a code of that token.

    vanilla: the code W1[x] itself; gated: the code times a gate that also reads the slot's state; rnn: a recurrent
    state along the block, started at zero.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.kind, self.rank = config.markov_head, rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def latent(self, tokens: mx.array, hidden: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
        """What W2 reads, [..., R], and the next state, for tokens [...] before slots with states `hidden` [..., H]."""
        code: mx.array = self.markov_w1(tokens)
        if self.kind == "gated":
            return mx.sigmoid(self.gate_proj(mx.concatenate([hidden, code], axis=-1))) * code, state
        if self.kind == "rnn":
            joined = self.joint_proj(mx.concatenate([state, code, hidden], axis=-1))
            gate, new, out = mx.split(joined, 3, axis=-1)
            share = mx.sigmoid(gate)
            return mx.tanh(out), share * state + (1 - share) * mx.tanh(new)
        return code, state


class ConfidenceHead(nn.Module):
    """Probability that a slot is accepted if all before it are."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def __call__(self, hidden_TH: mx.array, code_TR: mx.array | None) -> mx.array:
        """Logits [T] from states and the Markov codes W1[x] of the tokens before them."""
        if self.with_markov:
            assert code_TR is not None
            hidden_TH = mx.concatenate([hidden_TH, code_TR], axis=-1)
        out: mx.array = self.proj(hidden_TH)[:, 0]
        return out
