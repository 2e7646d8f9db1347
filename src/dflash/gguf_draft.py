"""GGUF drafts: translated once to a safetensors folder in the user's cache, in the layout of the original checkpoint.

Knows the one layout that llama.cpp's converter writes since it supports DFlash (June 2026): architecture "dflash", for
DFlash v1 and DFlash 2. Everything that follows (dialects, networks, checks) then sees an ordinary draft; what the file
states is passed on as it is and judged there. Older converters numbered the taps differently under the same key, and
DSpark drafts come in several packagings: those are refused, since a wrong guess would only show as lost speed.

No tensor library beside NumPy: every backend reads the result. Quantised weights are stored as float32, exactly as the
file gives them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dflash.cache import build_once, cache_root, file_sha256
from dflash.core.draft_config import CONFIG_FILE, WEIGHTS_FILE
from dflash.errors import CheckpointError, UnsupportedModel

ARCHITECTURE = "dflash"
INSTEAD = "give the draft that it was made from, by its hub id or as a folder with config.json and safetensors"
_KEY_LENGTH = 16

_WHOLE: Mapping[str, str] = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
}
_PER_LAYER: Mapping[str, str] = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}
"""Tensor names here and in the original layout, for the whole draft and behind "blk.N." or "layers.N."."""

_REQUIRED: Mapping[str, str] = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "feed_forward_length": "intermediate_size",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "block_size": "block_size",
}
_OPTIONAL: Mapping[str, str] = {
    "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
    "attention.causal": "is_causal",
    "sample_from_anchor": "sample_from_anchor",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "output_multiplier",
}
"""Keys behind "dflash." and those of config.json."""
_IGNORED = ("d2t", "token_embd.weight", "output.weight")
"""A full-vocabulary draft that repeats its target's embedding and head; `d2t` makes it a reduced one, see below."""


def translated_folder(
    gguf: Path, *, cache: Path | None = None, progress: Callable[[str, float | None], None] | None = None
) -> Path:
    """The safetensors folder of a GGUF draft, made if need be; its key is the file's content (SHA-256).

    `cache` is replaced in tests. Raises CheckpointError for a file that is damaged or lacks what a draft must state,
    UnsupportedModel for another layout or kind of draft, ConfigError if the cache cannot be written.
    """
    try:
        digest = file_sha256(gguf)
    except OSError as error:
        raise CheckpointError(f"{gguf} cannot be read ({error.strerror or error}); check its permissions.") from error

    def report(what: str) -> None:
        if progress is not None:
            progress(what, None)

    def build(folder: Path) -> None:
        report(f"translating {gguf.name} once")
        translate(gguf, folder)

    folder = (cache or cache_root()) / "drafts" / gguf.stem / digest[:_KEY_LENGTH]
    return build_once(folder, build, source={"file": gguf.name, "sha256": digest}, wait=report)


def translate(gguf: Path, folder: Path) -> None:
    """Write config.json and model.safetensors of the draft `gguf` into `folder`. Errors as `translated_folder`."""
    try:
        reader = GGUFReader(gguf)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{gguf} is no readable GGUF file ({error}); download it again.") from error
    stated = _Stated({name: field.contents for name, field in reader.fields.items()}, gguf)
    stated.check_layout({tensor.name for tensor in reader.tensors})
    tensors: dict[str, NDArray[Any]] = {}
    for tensor in reader.tensors:
        if tensor.name not in _IGNORED:
            tensors[_original_name(tensor.name, gguf)] = _values(tensor, gguf)
    config = stated.config(tensors)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / WEIGHTS_FILE)


class _Stated:
    """The key-value part of a file. Reading an array takes long, so only what is asked for is read."""

    def __init__(self, fields: Mapping[str, Callable[[], Any]], gguf: Path) -> None:
        self._fields, self._gguf = fields, gguf

    def find(self, key: str) -> Any:
        """Value of a full key, or None."""
        return self._fields[key]() if key in self._fields else None

    def required(self, key: str) -> Any:
        value = self.find(key)
        if value is None:
            raise CheckpointError(
                f"{self._gguf} does not state {key}. It is never guessed, since a wrong value only shows as lost "
                f"speed: convert the draft again with a present llama.cpp, or {INSTEAD}."
            )
        return value

    def check_layout(self, names: set[str]) -> None:
        """Raise UnsupportedModel unless this is the layout that this file reads."""
        what = None
        if (architecture := self.find("general.architecture")) != ARCHITECTURE:
            what = f"is a model of architecture {architecture!r}, not a DFlash draft ({ARCHITECTURE!r})"
        elif "dflash.target_hidden_size" in self._fields or "dflash.mask_token_id" in self._fields:
            what = "was written before llama.cpp settled its layout: which layers its taps mean cannot be told"
        elif "markov_w1.weight" in names or "d2t" in names:
            what = "is a DSpark or reduced-vocabulary draft, which this version reads from safetensors only"
        elif self.find("dflash.hyper_connection_count"):
            what = "belongs inside a DeepSeek-V4 target"
        if what is not None:
            raise UnsupportedModel(f"{self._gguf} {what}; {INSTEAD}.")

    def config(self, tensors: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """The config.json of the original layout."""
        head_dim = self.find("dflash.attention.key_length")
        if head_dim is None:
            norm = tensors.get("layers.0.self_attn.k_norm.weight")
            head_dim = self.required("dflash.attention.key_length") if norm is None else norm.size
        turned = self.find("dflash.rope.dimension_count")
        if turned not in (None, head_dim):
            raise UnsupportedModel(f"{self._gguf} rotates {turned} of {head_dim} dimensions of a head; {INSTEAD}.")
        vocab_size = self.find("dflash.vocab_size") or len(self.required("tokenizer.ggml.tokens"))
        second = "candidate_selector.hidden_projection.weight" in tensors
        config: dict[str, Any] = {
            "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
            "model_type": "qwen3",
            "head_dim": int(head_dim),
            "vocab_size": int(vocab_size),
            "mask_token_id": int(self.required("tokenizer.ggml.mask_token_id")),
            # Counted here as the input of a layer, in the original as the output of the one before it.
            "target_layer_ids": [int(layer) - 1 for layer in self.required("dflash.target_layers")],
        }
        for key, name in _REQUIRED.items():
            config[name] = _plain(self.required(f"dflash.{key}"))
        for key, name in _OPTIONAL.items():
            if (value := self.find(f"dflash.{key}")) is not None:
                config[name] = _plain(value)
        return {**config, **self._windows(), **self._rope_scaling()}

    def _windows(self) -> dict[str, Any]:
        window = self.find("dflash.attention.sliding_window")
        if not window:
            return {}
        pattern = self.required("dflash.attention.sliding_window_pattern")
        kinds = ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
        return {"use_sliding_window": True, "sliding_window": int(window), "layer_types": kinds}

    def _rope_scaling(self) -> dict[str, Any]:
        kind = self.find("dflash.rope.scaling.type")
        if kind in (None, "none"):
            return {}
        if (scale := self.find("dflash.rope.scaling.attn_factor")) not in (None, 1.0):
            raise UnsupportedModel(f"{self._gguf} scales attention by {scale} beside its rotary scaling; {INSTEAD}.")
        names = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
        names |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        found = {name: self.find(f"dflash.rope.scaling.{key}") for key, name in names.items()}
        values = {name: _plain(value) for name, value in found.items() if value is not None}
        return {"rope_scaling": {"rope_type": kind, **values}}


def _plain(value: Any) -> Any:
    """As JSON takes it. A float32 becomes the shortest decimal that names it, as it stood in the original: 1e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _original_name(name: str, gguf: Path) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    known = _WHOLE.get(name) if layer is None else _PER_LAYER.get(layer[2])
    if known is None:
        raise UnsupportedModel(
            f"{gguf} has a tensor {name!r}, which belongs to no DFlash draft that this version knows; {INSTEAD}."
        )
    return known if layer is None else f"layers.{layer[1]}.{known}"


def _values(tensor: Any, gguf: Path) -> NDArray[Any]:
    try:
        values: NDArray[Any] = dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedModel(
            f"{gguf}: tensor {tensor.name} is of type {tensor.tensor_type.name}, which the installed package gguf "
            f"does not unpack; update it, or {INSTEAD}."
        ) from error
    return np.ascontiguousarray(values, dtype=np.float16 if values.dtype == np.float16 else np.float32)
