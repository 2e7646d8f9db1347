"""The EAGLE-3 network (arXiv:2503.01840 §3): a decoder layer over pairs of an embedding and a hidden state.

Row r stands for the token at position r + 1 and what the target knew at position r: its taps fused by `fc`, or in a
chain the network's own output of the step before. What a row adds to the keys and values is kept by the caller, who
also decides which rows see which. Knows nothing of sessions, embeddings' owner, or vocabularies.

Shape letters: R rows, H hidden, I inputs of a projection, F features (taps x width), Q query heads, K key/value heads,
S kept rows, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.backends.torch.draft_attention import RMSNorm, Rotary, rotary_tables, rotate
from dflash.backends.torch.draft_model import MLP
from dflash.backends.torch.packing import KernelChoice, pack_linears
from dflash.core.eagle3_config import Eagle3Config, llama3_frequencies


@dataclass
class KeptRows:
    """Keys (rotated) and values of one layer, with room behind the rows that are filled."""

    keys_KSD: Tensor
    values_KSD: Tensor


@dataclass(frozen=True)
class Fed:
    """Where fed rows stand among the kept ones."""

    base: int
    """Index of the first fed row's place."""
    mask_RS: Tensor | None
    """Which of the rows from `first` up to the last fed one each row sees; None = all of them."""
    first: int = 0
    """Earlier rows are seen by none."""


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
        self.q_norm = RMSNorm(width, eps=config.rms_norm_eps) if config.head_norms else None
        self.k_norm = RMSNorm(width, eps=config.rms_norm_eps) if config.head_norms else None

    def keep(self, x_RI: Tensor, rotary: Rotary, kept: KeptRows, base: int) -> None:
        """Write the rows' keys and values to their places."""
        rows = len(x_RI)
        keys_RKD = self.k_proj(x_RI).view(rows, self.num_kv_heads, self.head_dim)
        if self.k_norm is not None:
            keys_RKD = self.k_norm(keys_RKD)
        kept.keys_KSD[:, base : base + rows] = rotate(keys_RKD, rotary).transpose(0, 1)
        values_RKD = self.v_proj(x_RI).view(rows, self.num_kv_heads, self.head_dim)
        kept.values_KSD[:, base : base + rows] = values_RKD.transpose(0, 1)

    def forward(self, x_RI: Tensor, rotary: Rotary, kept: KeptRows, fed: Fed) -> Tensor:
        """Keep the rows and attend; [R, H]."""
        rows = len(x_RI)
        self.keep(x_RI, rotary, kept, fed.base)
        queries_RQD = self.q_proj(x_RI).view(rows, self.num_heads, self.head_dim)
        if self.q_norm is not None:
            queries_RQD = self.q_norm(queries_RQD)
        queries_QRD = rotate(queries_RQD, rotary).transpose(0, 1)
        seen = slice(fed.first, fed.base + rows)
        mixed_QRD = F.scaled_dot_product_attention(
            queries_QRD[None],
            kept.keys_KSD[None, :, seen],
            kept.values_KSD[None, :, seen],
            attn_mask=fed.mask_RS,
            enable_gqa=True,
        )[0]
        out: Tensor = self.o_proj(mixed_QRD.transpose(0, 1).reshape(rows, -1))
        return out


class Eagle3Layer(nn.Module):
    """The first layer reads two states side by side; further ones are ordinary decoder layers."""

    def __init__(self, config: Eagle3Config, number: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RMSNorm(hidden, eps=eps) if number == 0 else None
        self.self_attn = Eagle3Attention(config, num_inputs=hidden if number else 2 * hidden)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps=eps)

    def inputs(self, embedded_RH: Tensor, x_RH: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [R, I], and the residual [R, H]."""
        if self.hidden_norm is None:
            return self.input_layernorm(x_RH), x_RH
        normed_RH = self.hidden_norm(x_RH)
        paired = torch.cat([self.input_layernorm(embedded_RH), normed_RH], dim=-1)
        return paired, normed_RH if self.norm_before_residual else x_RH

    def forward(self, embedded_RH: Tensor, x_RH: Tensor, rotary: Rotary, kept: KeptRows, fed: Fed) -> Tensor:
        """[R, H], before any norm."""
        inputs_RI, residual_RH = self.inputs(embedded_RH, x_RH)
        x_RH = residual_RH + self.self_attn(inputs_RI, rotary, kept, fed)
        out: Tensor = x_RH + self.mlp(self.post_attention_layernorm(x_RH))
        return out


class Eagle3Model(nn.Module):
    """Fusion of the taps, the layers, the norm before the head; embedding and head where the checkpoint has its own."""

    vocabulary: tuple[int, ...] | None = None
    """Target ids that the head scores, ascending; None = all."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden, eps, features = config.hidden_size, config.rms_norm_eps, config.fc_in_features
        self.fc = nn.Linear(features, hidden, bias=False)
        self.input_norm = RMSNorm(features, eps=eps) if config.fused_norm == "whole" else None
        taps = features // config.tap_width
        each = config.fused_norm == "each"
        self.fc_norm = nn.ModuleList([RMSNorm(config.tap_width, eps=eps) for _ in range(taps)]) if each else None
        self.layers = nn.ModuleList([Eagle3Layer(config, number) for number in range(config.num_hidden_layers)])
        self.norm = RMSNorm(hidden, eps=eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if config.owns_embedding else None
        rows = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(hidden, rows, bias=False) if config.owns_head else None

    def for_decoding(self) -> None:
        """Run on packed weights from now on where that pays, see `DraftModel.for_decoding`; the drafter packs the head
        that it scores with."""
        head, self.lm_head = self.lm_head, None
        pack_linears(self, choice=KernelChoice(packs_single=True))
        self.lm_head = head

    def fuse(self, features_RF: Tensor) -> Tensor:
        """One state [R, H] from the taps of each row, concatenated in their order."""
        if self.input_norm is not None:
            features_RF = self.input_norm(features_RF)
        if self.fc_norm is not None:
            parts = features_RF.chunk(len(self.fc_norm), dim=-1)
            features_RF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(features_RF)
        return fused

    def extend(self, embedded_RH: Tensor, fused_RH: Tensor, kept: list[KeptRows], base: int) -> None:
        """Keep committed rows; of the last layer only what later rows see of them is computed."""
        layers = self._layers()
        rows = len(fused_RH)
        positions = torch.arange(base, base + rows, device=fused_RH.device)
        rotary = self.rotary(positions, fused_RH.dtype)
        seen = torch.ones(rows, base + rows, dtype=torch.bool, device=fused_RH.device).tril(base)
        x_RH = fused_RH
        for layer, own in zip(layers[:-1], kept, strict=False):
            x_RH = layer(embedded_RH, x_RH, rotary, own, Fed(base, seen))
        layers[-1].self_attn.keep(layers[-1].inputs(embedded_RH, x_RH)[0], rotary, kept[-1], base)

    def step(self, embedded_RH: Tensor, x_RH: Tensor, kept: list[KeptRows], base: int, first: int = 0) -> Tensor:
        """R alternatives for one place of a chain: output [R, H], before the norm.

        Each sees the kept rows `first` to `base` and itself. The first one's keys and values stay at place `base`; the
        others lie behind it, where the next step writes.
        """
        rows = len(x_RH)
        mask = None
        if rows > 1:
            before = torch.ones(rows, base - first, dtype=torch.bool, device=x_RH.device)
            mask = torch.cat([before, torch.eye(rows, dtype=torch.bool, device=x_RH.device)], dim=1)
        rotary = self.rotary(torch.full((rows,), base, device=x_RH.device), x_RH.dtype)
        for layer, own in zip(self._layers(), kept, strict=True):
            x_RH = layer(embedded_RH, x_RH, rotary, own, Fed(base, mask, first))
        return x_RH

    def rotary(self, positions_R: Tensor, dtype: torch.dtype) -> Rotary:
        """Tables [R, 1, D] for rows at these positions."""
        config = self.config
        if config.llama3 is not None:
            frequencies = torch.from_numpy(llama3_frequencies(config.rope_theta, config.head_dim, config.llama3))
            frequencies = frequencies.to(positions_R.device)
            angles = (positions_R.float()[:, None] * frequencies).repeat(1, 2)[:, None]
            return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))
        if config.rope_factor != 1:
            positions_R = positions_R / config.rope_factor
        return rotary_tables(
            positions_R[:, None],
            config.head_dim,
            config.rope_theta,
            dtype,
            yarn=config.yarn,
            interleaved=config.rope_interleaved,
        )

    def _layers(self) -> list[Eagle3Layer]:
        return [layer for layer in self.layers if isinstance(layer, Eagle3Layer)]
