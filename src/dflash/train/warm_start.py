"""Where a new draft starts: at random, from the target's own last layers, or with attention that is already routed.

From the target: q/k norms, which the target may lack, get the measured root mean square of its queries and keys, so
that attention starts with the target's own temperature. fc passes the deepest tap through and adds the others weakly,
each scaled to unit size.

Routed: at random, a mask slot spreads its attention over hundreds of context rows, so the anchor's signal (one row)
starts near zero and the first thousand steps only learn token frequencies. Here some heads look for the anchor and
some for the latest context rows from the first step on, by directions fitted to the target's embeddings and features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dflash.backends.torch.draft_model import DraftLayer, DraftModel
from dflash.errors import UnsupportedModel


@torch.no_grad()
def random_start(draft: DraftModel, generator: torch.Generator) -> None:
    """Normal(0, 0.02) matrices, unit norms."""
    for parameter in draft.parameters():
        if parameter.ndim == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        else:
            parameter.fill_(1.0)


@torch.no_grad()
def start_from_target(
    draft: DraftModel,
    target_layers: Sequence[nn.Module],
    final_norm: nn.Module,
    sample_features_SF: Tensor,  # features of a typical sequence, for scales
    sample_inputs: Sequence[Tensor],  # normed attention inputs [S, H] of the last `num_layers` target layers
    generator: torch.Generator,
) -> list[str]:
    """Copy what fits from the target's last layers; returns names of draft parameters that could not be copied."""
    random_start(draft, generator)
    skipped: list[str] = []
    sources = list(target_layers)[-len(draft.layers) :]
    for number, (layer, source) in enumerate(zip(draft.layers, sources, strict=True)):
        assert isinstance(layer, DraftLayer)
        given = dict(source.named_parameters())
        for name, parameter in layer.named_parameters():
            if name in given and given[name].shape == parameter.shape:
                parameter.copy_(given[name])
                continue
            projection = getattr(getattr(source, "self_attn", None), f"{name.split('.')[1][0]}_proj", None)
            if name.endswith(("q_norm.weight", "k_norm.weight")) and projection is not None:
                parameter.fill_(float(projection(sample_inputs[number]).float().pow(2).mean().sqrt()))
            else:
                skipped.append(f"layers.{number}.{name}")
    entry = dict(sources[-1].named_parameters()).get("input_layernorm.weight")
    if entry is not None and entry.shape == draft.hidden_norm.weight.shape:
        draft.hidden_norm.weight.copy_(entry)
    weight = getattr(final_norm, "weight", None)
    if isinstance(weight, Tensor) and weight.shape == draft.norm.weight.shape:
        draft.norm.weight.copy_(weight)
    _start_fusion(draft, sample_features_SF, generator)
    return skipped


def _start_fusion(draft: DraftModel, features_SF: Tensor, generator: torch.Generator) -> None:
    hidden = draft.config.hidden_size
    taps = features_SF.float().view(features_SF.shape[0], -1, hidden)
    scales = taps.pow(2).mean(dim=(0, 2)).sqrt()
    for tap, scale in enumerate(scales):
        block = torch.randn((hidden, hidden), generator=generator) * 0.3 / hidden**0.5
        if tap == len(scales) - 1:
            block = torch.eye(hidden)
        draft.fc.weight.data[:, tap * hidden : (tap + 1) * hidden] = block / scale


def attention_inputs(model: Any, layers: Sequence[nn.Module], token_ids: np.ndarray[Any, Any]) -> list[Tensor]:
    """Normed inputs [S, H] of the attention of each layer for one sequence.

    Raises UnsupportedModel where a layer has no `input_layernorm`.
    """
    captured: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        captured.append(output[0])

    norms = [norm for layer in layers if isinstance(norm := getattr(layer, "input_layernorm", None), nn.Module)]
    if len(norms) < len(layers):
        raise UnsupportedModel(
            f"the layers of {type(model).__name__} have no `input_layernorm` to start a draft from; set "
            "network.start to random."
        )
    handles = [norm.register_forward_hook(keep) for norm in norms]
    try:
        with torch.inference_mode():
            model.get_decoder()(torch.from_numpy(token_ids)[None].to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return captured


_SAMPLE, _RIDGE, _NOISE, _OUTPUT_SCALE = 4000, 50.0, 0.3, 0.5
_ANCHOR_PAIRS, _CONTEXT_PAIRS = slice(5, 20), slice(0, 12)
"""Rotary pairs that carry the constant part: slow ones are flat over a block (anchor), fast ones fall off with
distance (latest context rows)."""


@torch.no_grad()
def start_routed(
    draft: DraftModel,
    features: Sequence[Tensor],  # [S, M * H] of some typical sequences
    embed_VH: Tensor,
    token_ids: Tensor,  # typical tokens, any number
    final_norm_H: Tensor,
    generator: torch.Generator,
) -> None:
    """Fit directions that tell ordinary tokens, context rows and mask slots apart, and build keys from them."""
    random_start(draft, generator)
    _start_fusion(draft, features[0], generator)
    config, hidden = draft.config, draft.config.hidden_size
    tokens = _unit(embed_VH[token_ids[torch.randint(len(token_ids), (_SAMPLE,), generator=generator)]])
    context = torch.cat([_unit(draft.fc(feature)) for feature in features])
    context = context[torch.randperm(len(context), generator=generator)[:_SAMPLE]]
    mask = _unit(embed_VH[config.mask_token_id])[None]
    anchor_H = _direction(tokens, context, mask, (1.0, -0.3, -1.0))
    context_H = _direction(tokens, context, mask, (-0.3, 1.0, -1.0))
    query_H = _direction(tokens, context, mask, (1.0, 0.0, 1.0))
    heads = config.num_key_value_heads
    for number, layer in enumerate(draft.layers):
        assert isinstance(layer, DraftLayer)
        attention = layer.self_attn
        for head in range(heads):
            # Which heads look for the anchor moves on from layer to layer.
            for_anchor = (head + number * (heads // 2 + 1)) % heads < (heads + 1) // 2
            key = _constant_key(config.head_dim, _ANCHOR_PAIRS if for_anchor else _CONTEXT_PAIRS)
            _write_head(attention.k_proj.weight, head, key, anchor_H if for_anchor else context_H, generator)
            for query in range(head * (attention.num_heads // heads), (head + 1) * (attention.num_heads // heads)):
                _write_head(attention.q_proj.weight, query, key, query_H, generator)
        values = attention.v_proj.weight
        values.copy_(torch.randn(values.shape, generator=generator) * hidden**-0.5)
        if values.shape[0] == hidden:
            values.copy_(torch.linalg.qr(values)[0])
            if attention.o_proj.weight.shape == values.shape:
                attention.o_proj.weight.copy_(values.T * _OUTPUT_SCALE)
        for projection in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight):
            projection.copy_(torch.randn(projection.shape, generator=generator) * hidden**-0.5)
        down = layer.mlp.down_proj.weight
        down.copy_(torch.randn(down.shape, generator=generator) * 0.3 * config.intermediate_size**-0.5)
    draft.norm.weight.copy_(final_norm_H * 0.3)  # the target's own scale would start with overconfident guesses


def _unit(x: Tensor) -> Tensor:
    """Root mean square 1 along the last dimension, as the layers' norms see it."""
    unit: Tensor = x.float() / x.float().pow(2).mean(-1, keepdim=True).add(1e-5).sqrt()
    return unit


def _direction(tokens: Tensor, context: Tensor, mask: Tensor, wanted: tuple[float, float, float]) -> Tensor:
    """Ridge regression: the direction [H] whose product with the three kinds of rows is as wanted."""
    parts = (tokens, context, mask.expand(_SAMPLE // 3, -1))
    x = torch.cat(parts)
    y = torch.cat([torch.full((len(part),), value) for part, value in zip(parts, wanted, strict=True)])
    solution: Tensor = torch.linalg.solve(x.T @ x + _RIDGE * torch.eye(x.shape[1]), x.T @ y)
    return solution


def _constant_key(head_dim: int, pairs: slice) -> Tensor:
    key = torch.zeros(head_dim)
    key[: head_dim // 2][pairs] = 1.0
    if not key.any():  # heads too narrow for the chosen pairs
        key.fill_(1.0)
    key /= key.norm()
    return key


def _write_head(weight: Tensor, head: int, key: Tensor, direction_H: Tensor, generator: torch.Generator) -> None:
    width = len(key)
    noise = torch.randn((width, weight.shape[1]), generator=generator) * _NOISE * weight.shape[1] ** -0.5
    weight[head * width : (head + 1) * width] = key[:, None] * direction_H * width**0.5 + noise
