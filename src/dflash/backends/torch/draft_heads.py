"""The parts that later drafts add to the v1 network: DFlash 2's dynamic convolution and candidate selector, DSpark's
Markov and confidence heads (arXiv:2607.05147).

Knows their mathematics; how a drafter walks through them is in `drafters/`. Shape letters as in `draft_model.py`, and
G groups of channels, R rank, V vocabulary, C candidates, T slots of one block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.core.draft_config import DraftConfig


class DynamicConvolution(nn.Module):
    """Grouped causal convolution along the slots of a block, its kernels part fixed and part read from the input.

    One projection of the sublayer's normed input serves both sides, before (0) and behind (1) the sublayer. Starts as
    the identity: the tap of the row itself 1, everything else 0.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.num_taps, self.group_size = config.conv_kernel_size, config.conv_group_size
        groups = config.hidden_size // self.group_size
        base = torch.zeros(2, self.num_taps, config.hidden_size)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.num_taps * groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, u: Tensor) -> Tensor:
        """Dynamic part of the kernels of both sides, [..., B, 2, taps, G], from the normed input [..., B, H]."""
        out: Tensor = self.kernel_projection(u).unflatten(-1, (2, self.num_taps, -1))
        return out

    def forward(self, v: Tensor, dynamic: Tensor, side: int) -> Tensor:
        """Convolve rows [..., B, H] with side `side`'s kernels; nothing lies before the block's first slot."""
        mixed = torch.zeros_like(v)
        for tap in range(self.num_taps):
            kernel = dynamic[..., side, tap, :].repeat_interleave(self.group_size, dim=-1) + self.base_kernel[side, tap]
            earlier = v if tap == 0 else F.pad(v, (0, 0, tap, 0))[..., : v.shape[-2], :]
            mixed = mixed + kernel * earlier
        return mixed


class CandidateSelector(nn.Module):
    """Scores of neighbouring tokens: how well candidate b of a slot goes with its predecessor a.

    S(a, b) = U(b) + <A[a] * (W z), B[b]>, with U the slot's logit and z its final state. B = 0 changes nothing.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        rank = config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.randn(config.vocab_size, rank) * 0.02)
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(self, unary_TC: Tensor, candidates_TC: Tensor, hidden_TH: Tensor, anchor_1: Tensor) -> Tensor:
        """Scores [T, C, C] of all transitions: [t, a, b] for candidate a of slot t - 1 and b of slot t.

        The predecessor of the first slot is the anchor alone, so all its rows are equal.
        """
        before_TC = torch.cat([anchor_1.expand(1, candidates_TC.shape[1]), candidates_TC[:-1]])
        left_TCR = self.predecessor_codebook[before_TC] * self.hidden_projection(hidden_TH)[:, None]
        scores: Tensor = unary_TC[:, None] + left_TCR @ self.successor_codebook[candidates_TC].transpose(1, 2)
        return scores


class MarkovHead(nn.Module):
    """Adds to a slot's logits what follows from the token before it: W2 of a code of that token.

    vanilla: the code W1[x] itself; gated: the code times a gate that also reads the slot's state; rnn: a recurrent
    state along the block, started at zero.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.kind = config.markov_head
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        self.gate_proj = nn.Linear(hidden + rank, rank) if self.kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank) if self.kind == "rnn" else None

    def start(self, like: Tensor) -> Tensor:
        """Recurrent state before the first slot, [..., R] for rows [..., H] of states."""
        return like.new_zeros(*like.shape[:-1], self.markov_w2.in_features)

    def latent(self, tokens: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What W2 reads, [..., R], and the next state, for tokens [...] before slots with states `hidden` [..., H]."""
        code: Tensor = self.markov_w1(tokens)
        if self.gate_proj is not None:
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, code], dim=-1))) * code, state
        if self.joint_proj is not None:
            gate, new, out = self.joint_proj(torch.cat([state, code, hidden], dim=-1)).chunk(3, dim=-1)
            share = torch.sigmoid(gate)
            return torch.tanh(out), share * state + (1 - share) * torch.tanh(new)
        return code, state


class ConfidenceHead(nn.Module):
    """Probability that a slot is accepted if all before it are."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, code: Tensor | None) -> Tensor:
        """Logits [...] from states [..., H] and the Markov codes W1[x] [..., R] of the tokens before them."""
        if self.with_markov:
            assert code is not None
            hidden = torch.cat([hidden, code], dim=-1)
        out: Tensor = self.proj(hidden).squeeze(-1)
        return out
