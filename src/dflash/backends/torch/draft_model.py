"""The DFlash v1 draft network: the only definition, used by training and by inference (arXiv:2602.06036 §3).

Knows the mathematics of one block given context keys and values; does not know embeddings' owner, caches,
sampling or losses. Embedding and head belong to the frozen target and are passed in.

Shape letters: N sequences, A blocks (anchors) per sequence, B slots, S context rows, H hidden, M taps,
Q query heads, K key/value heads, D head width, R = A * B block rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.backends.torch.loading import fits_memory
from dflash.core.draft_config import WEIGHTS_FILE, DraftConfig, read_draft_config, read_draft_vocabulary
from dflash.errors import CheckpointError


class ContextKV(NamedTuple):
    """Keys (rotated) and values of context rows for one draft layer.

    The last `spare` rows hold nothing yet: an inference block writes its own keys and values there, which saves
    copying the whole context every round.
    """

    keys_NKSD: Tensor
    values_NKSD: Tensor
    spare: int = 0


class Rotary(NamedTuple):
    """Rotary tables for a set of positions."""

    cos: Tensor  # [..., D] float32 or the network's dtype
    sin: Tensor  # [..., D]


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """cos and sin for absolute `positions` (any shape, integers): [..., D], angles computed in float32."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.to(torch.float32)[..., None] * (theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the two halves of the last dimension (neox order); tables broadcast over heads."""
    first, second = x.chunk(2, dim=-1)
    return x * rotary.cos + torch.cat([-second, first], dim=-1) * rotary.sin


class RMSNorm(nn.RMSNorm):
    """Computes in the dtype of its weight: under autocast the input may be narrower, which torch runs unfused."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention of block rows over context rows and their own block."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, width
        self.q_proj = nn.Linear(config.hidden_size, heads * width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * width, bias=False)
        self.o_proj = nn.Linear(heads * width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(width, eps=config.rms_norm_eps)

    def project_context(self, context_NSH: Tensor, rotary_SD: Rotary) -> ContextKV:
        """K/V of context rows: they depend on the fused features alone, so they are computed once per token."""
        n, s, _ = context_NSH.shape
        keys = self.k_norm(self.k_proj(context_NSH).view(n, s, self.num_kv_heads, self.head_dim)).transpose(1, 2)
        values = self.v_proj(context_NSH).view(n, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        return ContextKV(rotate(keys, rotary_SD), values)

    def forward(self, u_NABH: Tensor, context: ContextKV, rotary: Rotary, bias_NAS: Tensor | None) -> Tensor:
        """`rotary` tables are [N, A, B, 1, D]; `bias_NAS` is added to context scores (0 or -inf), None = all seen."""
        n, a, b, _ = u_NABH.shape
        queries = rotate(self.q_norm(self.q_proj(u_NABH).view(n, a, b, self.num_heads, self.head_dim)), rotary)
        keys = rotate(self.k_norm(self.k_proj(u_NABH).view(n, a, b, self.num_kv_heads, self.head_dim)), rotary)
        values = self.v_proj(u_NABH).view(n, a, b, self.num_kv_heads, self.head_dim)
        mixed = (
            _attend_one_block(queries, keys, values, context)
            if a == 1 and bias_NAS is None
            else _attend_blocks(queries, keys, values, context, bias_NAS)
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
    q_NABQD: Tensor, k_NABKD: Tensor, v_NABKD: Tensor, context: ContextKV, bias_NAS: Tensor | None
) -> Tensor:
    """Training: scores against the shared context and against the own block are computed apart and normalised
    together. The dense mask over all blocks would cost A times the in-block work (`train/mask.py` is the
    brute-force definition this is tested against)."""
    n, a, b, heads, d = q_NABQD.shape
    kv_heads = k_NABKD.shape[3]
    group, s = heads // kv_heads, context.keys_NKSD.shape[2]
    q_NKARD = (q_NABQD * d**-0.5).view(n, a, b, kv_heads, group, d).permute(0, 3, 1, 2, 4, 5).flatten(3, 4)
    k_NKABD, v_NKABD = (t.permute(0, 3, 1, 2, 4) for t in (k_NABKD, v_NABKD))
    rows = b * group
    to_context = (q_NKARD.flatten(2, 3) @ context.keys_NKSD.transpose(-1, -2)).view(n, kv_heads, a, rows, s)
    if bias_NAS is not None:
        to_context = to_context + bias_NAS[:, None, :, None, :].to(to_context.dtype)
    to_block = q_NKARD @ k_NKABD.transpose(-1, -2)
    weights = torch.cat([to_context, to_block], dim=-1).softmax(dim=-1, dtype=torch.float32).to(q_NABQD.dtype)
    from_context = (weights[..., :s].flatten(2, 3) @ context.values_NKSD).view(n, kv_heads, a, rows, d)
    mixed = from_context + weights[..., s:] @ v_NKABD
    return mixed.view(n, kv_heads, a, b, group, d).permute(0, 2, 3, 1, 4, 5).reshape(n, a, b, heads, d)


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """One draft layer; only block rows pass through it, context rows enter as keys and values."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x_NABH: Tensor, context: ContextKV, rotary: Rotary, bias_NAS: Tensor | None) -> Tensor:
        x_NABH = x_NABH + self.self_attn(self.input_layernorm(x_NABH), context, rotary, bias_NAS)
        out: Tensor = x_NABH + self.mlp(self.post_attention_layernorm(x_NABH))
        return out


class DraftModel(nn.Module):
    """The whole draft network; parameter names are those of z-lab v1 checkpoints."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.vocabulary: tuple[int, ...] | None = None
        """Target ids that the draft scores (ascending); None = all of the target's head."""
        self.fc = nn.Linear(config.fc_in_features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DraftLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def project_context(self, features_NSF: Tensor, positions_NS: Tensor) -> list[ContextKV]:
        """Keys and values of context rows for every layer.

        features_NSF: concatenated taps, F = M * H, in tap order. positions_NS: absolute positions.
        """
        fused: Tensor = self.hidden_norm(self.fc(features_NSF))
        tables = self._rotary(positions_NS[:, None, :], fused.dtype)
        return [layer.self_attn.project_context(fused, tables) for layer in self._layers()]

    def forward(
        self,
        embedded_NABH: Tensor,  # slot 0 = embed(anchor), slots 1.. = embed(mask)
        positions_NA: Tensor,  # absolute position of each block's anchor
        contexts: Sequence[ContextKV],
        bias_NAS: Tensor | None = None,  # 0 where context row s < anchor position is visible, else -inf
    ) -> Tensor:
        """Final normed hidden states [N, A, B, H]; slot i >= 1 predicts the token at position anchor + i."""
        slots = torch.arange(embedded_NABH.shape[2], device=positions_NA.device)
        rotary = self._rotary((positions_NA[..., None] + slots)[..., None], embedded_NABH.dtype)
        x_NABH = embedded_NABH
        for layer, context in zip(self._layers(), contexts, strict=True):
            x_NABH = layer(x_NABH, context, rotary, bias_NAS)
        out: Tensor = self.norm(x_NABH)
        return out

    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        return rotary_tables(positions, self.config.head_dim, self.config.rope_theta, dtype)


def load_draft(folder: Path, device: torch.device, dtype: torch.dtype) -> DraftModel:
    """Read a draft folder (config.json, model.safetensors) into a network ready for inference.

    Every expected tensor must be there with its shape and finite numbers, and no other: a draft with a hole would
    still give correct text, only slowly. Raises CheckpointError (also for weights that overflow `dtype`),
    UnsupportedModel, or ConfigError if it does not fit into the device's memory.
    """
    config = read_draft_config(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}; drafts are read from safetensors only.")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); download or export the draft again.") from error
    with torch.device("meta"):
        network = DraftModel(config)
    network.vocabulary = read_draft_vocabulary(folder, config)
    check_tensors(network, tensors, source=str(path))
    with fits_memory(f"draft {folder}", dtype, device):
        tensors = {name: value.to(device=device, dtype=dtype) for name, value in tensors.items()}
    check_tensors(network, tensors, source=f"{path} as {dtype}")
    network.load_state_dict(tensors, strict=True, assign=True)
    return network.eval().requires_grad_(False)


def check_tensors(network: DraftModel, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Raise CheckpointError unless `tensors` are exactly the network's, finite and of its shapes."""
    expected = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    fused = tensors.get("fc.weight")
    if fused is not None and fused.ndim == 2 and fused.shape[1] != network.config.fc_in_features:
        taps = len(network.config.target_layer_ids)
        raise CheckpointError(
            f"{source}: fc reads {fused.shape[1]} features, but {taps} taps of width {network.config.hidden_size} give "
            f"{network.config.fc_in_features}; target_layer_ids in config.json is not the list of the training."
        )
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unexpected:
        parts = [f"lacks {missing[0]} (of {len(missing)})"] if missing else []
        parts += [f"has {unexpected[0]} (of {len(unexpected)}), which is not part of a v1 draft"] if unexpected else []
        raise CheckpointError(f"{source} {' and '.join(parts)}; config.json and weights do not belong together.")
    for name, value in tensors.items():
        if tuple(value.shape) != expected[name]:
            raise CheckpointError(f"{source}: {name} has shape {list(value.shape)}, not {list(expected[name])}.")
        if not value.is_floating_point():
            raise CheckpointError(f"{source}: {name} holds {value.dtype}, not floating-point weights; export it again.")
        if not bool(value.isfinite().all()):
            raise CheckpointError(f"{source}: {name} holds NaN or infinity; the draft is unusable, export it again.")
