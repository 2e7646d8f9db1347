"""The draft network: the only definition, used by training and by inference (arXiv:2602.06036 §3).

Knows the mathematics of one block given context keys and values; does not know embeddings' owner, caches,
sampling or losses. Embedding and head belong to the frozen target unless the checkpoint has its own, and are passed in.

Shape letters: N sequences, A blocks (anchors) per sequence, B slots, S context rows, H hidden, M taps,
Q query heads, K key/value heads, D head width, R = A * B block rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.backends.torch.draft_attention import (
    ALL_VISIBLE,
    Attention,
    BlockMask,
    ContextKV,
    RMSNorm,
    Rotary,
    block_mask,
    rotary_tables,
)
from dflash.backends.torch.draft_heads import CandidateSelector, ConfidenceHead, DynamicConvolution, MarkovHead
from dflash.backends.torch.fused import FusedLinears, packed
from dflash.backends.torch.packing import has_room
from dflash.core.draft_config import FULL_ATTENTION, DraftConfig, LayerAttention

__all__ = ["MLP", "ContextKV", "DraftLayer", "DraftModel"]


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self._fused: FusedLinears | None = None

    def fuse(self, *, packs: bool) -> None:
        """Gate and up by one matmul from now on (fused.py)."""
        self._fused = FusedLinears([self.gate_proj, self.up_proj], packs=packs)
        self.down_proj = packed(self.down_proj) if packs else self.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (self.gate_proj(x), self.up_proj(x)) if self._fused is None else self._fused(x)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class DraftLayer(nn.Module):
    """One draft layer; only block rows pass through it, context rows enter as keys and values."""

    def __init__(self, config: DraftConfig, number: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, number)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        convolved = config.conv_kernel_size > 0
        self.attention_conv = DynamicConvolution(config) if convolved else None
        self.mlp_conv = DynamicConvolution(config) if convolved else None

    def forward(self, x_NABH: Tensor, context: ContextKV, rotary: Rotary, mask: BlockMask = ALL_VISIBLE) -> Tensor:
        """Pass block rows through; DFlash 2 convolves them before and behind each sublayer."""
        u_NABH = self.input_layernorm(x_NABH)
        if self.attention_conv is None:
            x_NABH = x_NABH + self.self_attn(u_NABH, context, rotary, mask)
        else:
            kernels = self.attention_conv.kernels(u_NABH)
            mixed = self.self_attn(self.attention_conv(u_NABH, kernels, 0), context, rotary, mask)
            x_NABH = x_NABH + self.attention_conv(mixed, kernels, 1)
        u_NABH = self.post_attention_layernorm(x_NABH)
        out: Tensor
        if self.mlp_conv is None:
            out = x_NABH + self.mlp(u_NABH)
            return out
        kernels = self.mlp_conv.kernels(u_NABH)
        out = x_NABH + self.mlp_conv(self.mlp(self.mlp_conv(u_NABH, kernels, 0)), kernels, 1)
        return out


class DraftModel(nn.Module):
    """The whole draft network; parameter names are those of published checkpoints (`core/draft_tensors.py`)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.vocabulary: tuple[int, ...] | None = None
        """Target ids that the draft scores (ascending); None = all of the head."""
        self.fc = nn.Linear(config.fc_in_features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DraftLayer(config, number) for number in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.owns_embedding else None
        rows = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, rows, bias=False) if config.owns_head else None
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        self._fused_context: FusedLinears | None = None

    def for_decoding(self) -> None:
        """Run on joint and, on CPUs, packed weights from now on: the same function, several times faster for the rows
        of one block. Once, on loaded weights, in evaluation mode; a network that is fused is not trained any more."""
        layers = self._layers()
        context = [part for layer in layers for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        own = [module.weight for module in self.modules() if isinstance(module, nn.Linear)]
        packs = has_room(own + [part.weight for part in context])
        self._fused_context = FusedLinears(context, packs=packs, owns=False)
        for layer in layers:
            layer.self_attn.fuse(packs=packs)
            layer.mlp.fuse(packs=packs)
        self.fc = packed(self.fc) if packs else self.fc

    def project_context(self, features_NSF: Tensor, positions_NS: Tensor) -> list[ContextKV]:
        """Keys and values of context rows for every layer.

        features_NSF: concatenated taps, F = M * H, in tap order. positions_NS: absolute positions.
        """
        fused: Tensor = self.hidden_norm(self.fc(features_NSF))
        tables = self._rotary(positions_NS[:, None, :], fused.dtype)
        pairs = list(zip((layer.self_attn for layer in self._layers()), tables, strict=True))
        if self._fused_context is None:
            return [attention.project_context(fused, rotary) for attention, rotary in pairs]
        rows = self._fused_context(fused)
        return [
            attention.as_context(rows[2 * number], rows[2 * number + 1], rotary)
            for number, (attention, rotary) in enumerate(pairs)
        ]

    def forward(
        self,
        embedded_NABH: Tensor,  # slot 0 = embed(anchor), slots 1.. = embed(mask), unscaled
        positions_NA: Tensor,  # absolute position of each block's anchor
        contexts: Sequence[ContextKV],
        bias_NAS: Tensor | None = None,  # 0 where context row s < anchor position is visible, else -inf
    ) -> Tensor:
        """Final normed hidden states [N, A, B, H]; slot i >= 1 predicts the token at position anchor + i (at
        anchor + i + 1, slot 0 as well, where the anchor slot predicts)."""
        num_slots = embedded_NABH.shape[2]
        slots = torch.arange(num_slots, device=positions_NA.device)
        tables = self._rotary((positions_NA[..., None] + slots)[..., None], embedded_NABH.dtype)
        masks: dict[tuple[LayerAttention, int], BlockMask] = {}
        x_NABH = embedded_NABH
        if self.config.input_embedding_scale != 1:
            x_NABH = x_NABH * self.config.input_embedding_scale
        for number, (layer, context, rotary) in enumerate(zip(self._layers(), contexts, tables, strict=True)):
            rules = self.config.attention_of(number)
            key = rules, context.first
            if key not in masks:
                plain = rules == FULL_ATTENTION and bias_NAS is None
                masks[key] = ALL_VISIBLE if plain else self._mask(rules, positions_NA, context, num_slots, bias_NAS)
            x_NABH = layer(x_NABH, context, rotary, masks[key])
        out: Tensor = self.norm(x_NABH)
        return out

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Multiplier and cap of this draft, applied to what the head gave (any shape)."""
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _mask(
        self,
        rules: LayerAttention,
        positions_NA: Tensor,
        context: ContextKV,
        num_slots: int,
        bias_NAS: Tensor | None,
    ) -> BlockMask:
        return block_mask(
            rules,
            positions_NA,
            context,
            num_slots=num_slots,
            window_from_anchor=self.config.window_from_anchor,
            bias_NAS=bias_NAS,
        )

    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> list[Rotary]:
        """One table per layer; layers with the same base share it."""
        config = self.config
        thetas = [config.rope_theta_of(number) for number in range(config.num_hidden_layers)]
        tables = {
            theta: rotary_tables(
                positions, config.head_dim, theta, dtype, yarn=config.yarn, interleaved=config.rope_interleaved
            )
            for theta in set(thetas)
        }
        return [tables[theta] for theta in thetas]
