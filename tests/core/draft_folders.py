"""Draft folders of any dialect, written without a tensor library: hand-written configs and safetensors of zeros."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash.core.draft_config import CONFIG_FILE, WEIGHTS_FILE

H, V, LAYERS, BLOCK, MASK = 32, 97, 2, 8, 90
TAPS = (1, 9, 17)
SIZES: dict[str, Any] = {
    "hidden_size": H,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "vocab_size": V,
}
PLAIN: dict[str, Any] = {**SIZES, "rope_theta": 1e6, "block_size": BLOCK, "num_target_layers": 36}
FULL = ["full_attention"] * LAYERS

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Stored name -> type in the format's spelling and shape."""


def v1_tensors(**changes: tuple[int, ...]) -> Tensors:
    """The 25 tensors of a two-layer v1 draft, as published names and shapes."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 3 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for number in range(LAYERS):
        shapes |= {
            f"layers.{number}.self_attn.q_proj.weight": (32, H),
            f"layers.{number}.self_attn.k_proj.weight": (16, H),
            f"layers.{number}.self_attn.v_proj.weight": (16, H),
            f"layers.{number}.self_attn.o_proj.weight": (H, 32),
            f"layers.{number}.self_attn.q_norm.weight": (8,),
            f"layers.{number}.self_attn.k_norm.weight": (8,),
            f"layers.{number}.mlp.gate_proj.weight": (48, H),
            f"layers.{number}.mlp.up_proj.weight": (48, H),
            f"layers.{number}.mlp.down_proj.weight": (H, 48),
            f"layers.{number}.input_layernorm.weight": (H,),
            f"layers.{number}.post_attention_layernorm.weight": (H,),
        }
    return {name: ("BF16", shape) for name, shape in (shapes | changes).items()}


def tensors(**shapes: tuple[int, ...]) -> Tensors:
    """Further bfloat16 tensors; a double underscore stands for a dot."""
    return {name.replace("__", "."): ("BF16", shape) for name, shape in shapes.items()}


OWN = tensors(embed_tokens__weight=(V, H), lm_head__weight=(V, H))
MARKOV = tensors(markov_head__markov_w1__weight=(V, 6), markov_head__markov_w2__weight=(V, 6))
CONFIDENCE = tensors(confidence_head__proj__weight=(1, H + 6), confidence_head__proj__bias=(1,))
CONVOLUTIONS = {
    f"layers.{number}.{where}.{name}": ("BF16", shape)
    for number in range(LAYERS)
    for where in ("attention_conv", "mlp_conv")
    for name, shape in (("base_kernel", (2, 2, H)), ("kernel_projection.weight", (2 * 2 * 4, H)))
}
SELECTOR = tensors(
    candidate_selector__predecessor_codebook=(V, 5),
    candidate_selector__successor_codebook=(V, 5),
    candidate_selector__hidden_projection__weight=(5, H),
)

_BYTES = {"BF16": 2, "F32": 4, "F16": 2, "I64": 8, "BOOL": 1, "U8": 1}


def write_safetensors(path: Path, held: Tensors, data: Mapping[str, bytes] | None = None) -> None:
    """Write a file of these tensors; zeros where `data` has no bytes."""
    header: dict[str, Any] = {}
    pieces: list[bytes] = []
    offset = 0
    for name, (kind, shape) in held.items():
        piece = (data or {}).get(name, bytes(math.prod(shape) * _BYTES[kind]))
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + len(piece)]}
        pieces.append(piece)
        offset += len(piece)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(pieces))


def write_draft(
    folder: Path, config: Mapping[str, Any], held: Tensors, data: Mapping[str, bytes] | None = None
) -> Path:
    """Write a draft folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    write_safetensors(folder / WEIGHTS_FILE, held, data)
    return folder


def table(kept: list[int]) -> dict[str, bytes]:
    """d2t (offsets) and t2d (truth values) of a reduced vocabulary."""
    offsets = np.array(kept, np.int64) - np.arange(len(kept))
    marks = np.zeros(V, np.bool_)
    marks[kept] = True
    return {"d2t": offsets.tobytes(), "t2d": marks.tobytes()}
