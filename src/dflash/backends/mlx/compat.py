"""What we know of mlx-lm: its versions, where its models keep layers, embedding and head, and configurations that it
reads differently from Transformers, which wrote them.

Nothing else in the package looks inside an mlx-lm model. Supported: mlx-lm 0.32.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from importlib.metadata import version as installed
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from packaging.version import Version

from dflash.errors import MissingExtra, UnsupportedModel

OLDEST = Version("0.32")
BEYOND = Version("0.33.dev0")

_EMBEDDINGS = ("embed_tokens", "embeddings", "wte", "tok_embeddings", "word_embeddings")
_DECODERS = ("model", "backbone", "transformer")
_ROPES = frozenset(
    {
        "RoPE",
        "Llama3RoPE",
        "YarnRoPE",
        "ProportionalRoPE",
        "DeepseekV2YarnRotaryEmbedding",
        "DynamicNTKAlphaRoPE",
    }
)
"""Not those whose base follows the length of the text."""

OffsetUse: TypeAlias = Literal["turns", "counts on"]
_OFFSET_USES: Mapping[str, OffsetUse] = MappingProxyType(
    {
        "mlx_lm.models.gemma4_text": "turns",  # an array, which it hands to rotary embeddings alone
        "mlx_lm.models.ministral3": "counts on",  # 0, 1, ... + offset, by which queries are scaled
    }
)


def check_mlx_lm(version: str | None = None) -> None:
    """Refuse an mlx-lm that this package was not written for.

    Raises:
        MissingExtra: `version` (default: the installed one) is not 0.32; the message gives the install command.
    """
    found = version or installed("mlx-lm")
    if not OLDEST <= Version(found) < BEYOND:
        raise MissingExtra(
            f'mlx-lm {found} is installed, but this version of dflash needs 0.32: run `pip install "mlx-lm==0.32.*"`.'
        )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a parsed config.json."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def adapted_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be added to a parsed config.json so that mlx-lm reads the rotary embedding as it was meant.

    Transformers 5 nests theta, scaling and partial factors in `rope_parameters`, per layer type if need be; most of
    mlx-lm's models look for the flat keys of older files and silently fall back to defaults.
    """
    if isinstance(config.get("text_config"), Mapping):
        inner = config["text_config"]
        return {"text_config": {**copy.deepcopy(dict(inner)), **_flat_rope(inner)}}
    return _flat_rope(config)


def _flat_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return {}
    by_layer = {name: part for name, part in rope.items() if isinstance(part, Mapping)}
    main = by_layer.get("full_attention", rope if not by_layer else next(iter(by_layer.values())))
    flat: dict[str, Any] = {name: main[name] for name in ("rope_theta", "partial_rotary_factor") if name in main}
    if main.get("rope_type", "default") != "default":
        flat["rope_scaling"] = {name: value for name, value in main.items() if name != "rope_theta"}
    if "rope_theta" in by_layer.get("sliding_attention", {}):
        flat["rope_local_base_freq"] = by_layer["sliding_attention"]["rope_theta"]
    return {name: value for name, value in flat.items() if config.get(name) is None}


def layer_caches(model: nn.Module) -> list[Any]:
    """The caches that mlx-lm itself would use: its own knowledge of the kinds of state, in the order of its models."""
    natives: list[Any] = make_prompt_cache(model)
    return natives


def decoder_layers(model: nn.Module) -> Sequence[Any]:
    """The decoder layers in order.

    Raises:
        UnsupportedModel: the model has no list `layers`.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, list):
        raise UnsupportedModel(f"{model_name(model)} has no list of layers; this version cannot use it as a target.")
    return layers


def model_name(model: nn.Module) -> str:
    """For messages: mlx-lm calls every class Model."""
    return f"mlx-lm's {getattr(model, 'model_type', type(model).__name__)}"


def embedding_and_head(model: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """(embedding, head) of the language model; a head of None is the embedding, transposed (tied weights).

    Raises:
        UnsupportedModel: they are not where mlx-lm's models usually keep them.
    """
    language = getattr(model, "language_model", model)
    for owner in (language, *(getattr(language, name, None) for name in _DECODERS)):
        for name in _EMBEDDINGS:
            embedding = getattr(owner, name, None) if owner is not None else None
            if isinstance(embedding, nn.Module) and hasattr(embedding, "as_linear"):
                head = getattr(language, "lm_head", None)
                return embedding, head if isinstance(head, nn.Module) else None
    raise UnsupportedModel(f"{model_name(model)}: its token embedding was not found; this version cannot use it.")


def embedding_shape(embedding: nn.Module) -> tuple[int, int]:
    """(vocabulary, width), for plain and quantised embeddings."""
    if isinstance(embedding, nn.QuantizedEmbedding):
        return int(embedding.num_embeddings), int(embedding.dims)
    rows, width = embedding.weight.shape
    return int(rows), int(width)


def activation_dtype(model: nn.Module) -> mx.Dtype:
    """The type that the model computes in: that of its embedded tokens, quantised or not."""
    embedding, _ = embedding_and_head(model)
    dtype: mx.Dtype = embedding(mx.array([0])).dtype
    return dtype


def rotary_embeddings(model: nn.Module) -> list[Any]:
    """The modules that give MLX's own rotary embedding an offset and use it for nothing else."""
    return [module for module in model.modules() if type(module).__name__ in _ROPES]


def offset_use(model: nn.Module) -> OffsetUse | None:
    """What the model does with an array of its cache's offset, besides handing it to rotary embeddings; None = nothing,
    or nothing that is known here."""
    kinds = type(decoder_layers(model)[0]).__mro__
    return next((_OFFSET_USES[kind.__module__] for kind in kinds if kind.__module__ in _OFFSET_USES), None)


def head_rows(head: nn.Module, ids: mx.array) -> mx.array:
    """Rows `ids` [K] of a head or tied embedding, [K, H], dequantised if need be."""
    weight: mx.array = head.weight[ids]
    if not hasattr(head, "scales"):
        return weight
    biases = head.get("biases")
    rows: mx.array = mx.dequantize(
        weight,
        head.scales[ids],
        None if biases is None else biases[ids],
        group_size=head.group_size,
        bits=head.bits,
        mode=getattr(head, "mode", "affine"),
    )
    return rows
