"""What differs between Transformers versions, and the one place where we plug into its interfaces.

Nothing else in the package looks at the version of Transformers, at the name of a model's cache argument, at the
classes of the library's own cache layers, or at its attention registry. Supported: 5.15 and later 5.x.

Known differences: the model argument is `cache` from 5.24 (`past_key_values` before, deprecated since); a cache layer
must answer `get_max_length` (newer) or `get_max_cache_shape` (older), and state.py answers both.
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from dflash.backends.torch.attention import AttentionForm, attend
from dflash.errors import MissingExtra, UnsupportedModel

__all__ = [
    "Cache",
    "CacheLayerMixin",
    "LayerSpec",
    "LinearAttentionCacheLayerMixin",
    "auto_class",
    "cache_argument",
    "check_transformers",
    "layer_specs",
    "own_cache",
    "text_config",
    "use_grouped_attention",
]

OLDEST = Version("5.15")
BEYOND = Version("6.dev0")
GROUPED_ATTENTION = "grouped_query"  # the library takes every name with "flash" in it for a flash kernel


def check_transformers(version: str = transformers.__version__) -> None:
    """Refuse a Transformers that this package was not written for.

    Raises:
        MissingExtra: `version` lies outside 5.15 <= version < 6; the message gives the install command.
    """
    if not OLDEST <= Version(version) < BEYOND:
        raise MissingExtra(
            f"Transformers {version} is installed, but this version of dflash needs 5.15 or a later 5.x: "
            'run `pip install "transformers>=5.15,<6"`.'
        )


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the argument by which `model` takes its cache.

    Read from the signature, not from the version: code that comes with a checkpoint keeps the old name. It is the
    class's: of an instance that somebody has wrapped, the signature says nothing.

    Raises:
        UnsupportedModel: the model takes no key/value cache (encoders, pure recurrent models).
    """
    parameters = inspect.signature(type(model).forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UnsupportedModel(
        f"{type(model).__name__} takes neither `cache` nor `past_key_values`, so its state cannot be rolled back; "
        "use a decoder-only language model with a key/value cache."
    )


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of Transformers that opens a checkpoint of this configuration as a language model.

    Some multimodal models (Kimi-K2.5) are known to it only with their images; decoding then uses their language model.
    """
    name = getattr(config, "model_type", None)
    is_wrapper = name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if is_wrapper else AutoModelForCausalLM


_COMMON_CACHES = frozenset({"Cache", "DynamicCache"})


def own_cache(model: PreTrainedModel) -> type[DynamicCache] | None:
    """The cache class that `model` insists on, where it is one of its own and we can stand in for it: it keeps one
    recurrent state per layer beside the common layers (MiniMax-Text-01). None: the common cache will do.

    Raises:
        UnsupportedModel: the model accepts nothing but a cache class of its own of another kind; names it.
    """
    decoder: Any = model.get_decoder()
    parameters = inspect.signature(type(decoder).forward).parameters
    annotations = [str(parameters[name].annotation) for name in ("cache", "past_key_values") if name in parameters]
    own = set(re.findall(r"\w*Cache\b", " ".join(annotations))) - _COMMON_CACHES
    if not own:
        return None
    name = own.pop()
    found = getattr(sys.modules[type(decoder).__module__], name, None)
    if isinstance(found, type) and issubclass(found, DynamicCache) and hasattr(found, "set_linear_cache"):
        return found
    raise UnsupportedModel(
        f"{type(model).__name__} keeps its state in a {name} of its own, which this version cannot roll back "
        "losslessly; use a target whose state Transformers keeps in its common cache."
    )


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Configuration of the language model, also inside a multimodal wrapper.

    Raises:
        UnsupportedModel: an encoder-decoder model.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{type(model).__name__} is an encoder-decoder model; only decoder-only models can be a target."
        )
    config: PreTrainedConfig = model.config.get_text_config(decoder=True)
    return config


@dataclass(frozen=True)
class LayerSpec:
    """What Transformers would keep for one layer, and which attention mask the layer reads."""

    state: str
    """Name of the library's class of the layer's state."""
    mask: str | None = "full_attention"
    """Key of the layer's mask, where a model takes several; None: the layer does not attend."""
    window: int | None = None
    """Keys that a row sees at most, itself included (of a chunk: its length); None = all before it."""
    num_states: int = 1
    """Recurrent states and convolution windows of the layer."""

    @property
    def is_recurrent(self) -> bool:
        """Whether the layer keeps recurrent states or convolution windows."""
        return self.state.startswith("LinearAttention")


_MASK_OF_LAYER = {
    "linear_attention": None,
    "conv": None,
    "moe": None,
    "mlp": None,
    "hybrid": "full_attention",
    "hybrid_sliding": "sliding_attention",
    "minimax_m3_sparse": "full_attention",
}
"""Layer types whose mask has another name, or that have none."""


def layer_specs(config: PreTrainedConfig) -> list[LayerSpec]:
    """The state that Transformers itself would keep for each layer, in layer order.

    This is the library's own knowledge of the model (layer types, windows, shared caches), so a new kind of state
    shows up under a name that we do not know instead of passing for a full cache.

    Raises:
        UnsupportedModel: a model that keeps more than that.
    """
    if getattr(config, "indexer_compress_ratio", None) is not None:
        raise UnsupportedModel(
            f"the indexer of {config.model_type} keeps the positions of all rows that were ever fed, which this "
            "version cannot roll back losslessly; use another target."
        )
    specs = []
    types = getattr(config, "layer_types", None)
    one_type = "full_attention"
    if getattr(config, "sliding_window", None) is not None:
        one_type = "sliding_attention"
    elif getattr(config, "attention_chunk_size", None) is not None:
        one_type = "chunked_attention"
    for index, layer in enumerate(DynamicCache(config=config).layers):
        layer_type = types[index] if types is not None else one_type
        specs.append(
            LayerSpec(
                type(layer).__name__,
                _MASK_OF_LAYER.get(layer_type, layer_type),
                getattr(layer, "sliding_window", None),
                getattr(layer, "number_of_states", 1),
            )
        )
    return specs


def use_grouped_attention(model: PreTrainedModel) -> AttentionForm:
    """Let `model` attend with `grouped_attention` in place of Transformers' SDPA function.

    Uses the library's registry of attention functions under a name of our own; the model's weights and other models
    are untouched. A model that attends eagerly keeps doing so.

    Returns:
        The form of the masks that the model now takes.

    Raises:
        UnsupportedModel: the attention takes no 4-D mask (flash, flex), which verification needs.
    """
    current = model.config._attn_implementation
    if current == "eager":
        return AttentionForm()
    if current not in ("sdpa", GROUPED_ATTENTION):
        raise UnsupportedModel(
            f"attention {current!r} cannot take the mask that verification needs: "
            'load the model with attn_implementation="sdpa".'
        )
    AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
    AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)
    if current == "sdpa":  # else a model that another process has stored, to whose registry the name was new
        model.set_attn_implementation(GROUPED_ATTENTION)
    if model.device.type != "cpu":
        return AttentionForm()
    # Flash kernels take no mask, so a model that may run on them does nothing of its own with it; Doge, say, does.
    hands_on = getattr(model, "_supports_flash_attn", False)
    groups = {getattr(module, "num_key_value_groups", None) for module in model.modules()} - {None}
    group = groups.pop() if hands_on and len(groups) == 1 else None
    return AttentionForm.on_cpu(group if isinstance(group, int) else 1)


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, heads, rows, head_dim]
    key: torch.Tensor,  # [B, kv_heads, keys, head_dim]
    value: torch.Tensor,  # [B, kv_heads, keys, head_dim]
    attention_mask: torch.Tensor | None,  # [B or 1, 1 or heads or group, rows or more, keys]
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA that reads the shared key/value heads in place; returns ([B, rows, heads, head_dim], None).

    On a CPU and without gradients `attention.attend`; everything else goes to Transformers' function.
    """
    extra = kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None
    causal_without_mask = attention_mask is None and query.shape[2] > 1
    if query.device.type != "cpu" or causal_without_mask or extra or torch.is_grad_enabled():
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    return attend(query, key, value, attention_mask, scaling).transpose(1, 2), None
