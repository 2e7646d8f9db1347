"""z-lab's own layout of DFlash v1, flat or with a nested `dflash_config`; plain DFlash exports of SpecForge, NeMo and
ModelOpt and this project's own drafts are written in it too. Written for DFlash 2 as well (`dflash2.py` reads that).
"""

from __future__ import annotations

from typing import Any

from dflash.core.dialects import fields
from dflash.core.dialects.base import NESTED, Checkpoint, Dialect, Lookup
from dflash.core.dialects.written import shape_keys
from dflash.core.draft_config import ARCHITECTURE, DraftConfig
from dflash.errors import UnsupportedModel

DFLASH2_ARCHITECTURE = "DFlash2DraftModel"
_OTHER_KINDS = {"markov_rank": "a DSpark draft", "projector_type": "a DSpark or Domino draft"}


def resolve(found: Checkpoint, lookup: Lookup) -> DraftConfig:
    """Read a DFlash v1 draft."""
    names = found.raw.get("architectures")
    if names is not None and names != [ARCHITECTURE]:
        raise UnsupportedModel(
            f"{found.source} is a draft of class {names}, which is of no kind that this version runs; drafts of class "
            f"{ARCHITECTURE} (DFlash), {DFLASH2_ARCHITECTURE}, DSpark and Speculators are."
        )
    for key, kind in _OTHER_KINDS.items():
        if lookup.find(key):
            raise UnsupportedModel(
                f"{found.source} has '{key}', which makes it {kind}, but nothing that says in which layout; use the "
                "checkpoint as it was published."
            )
    return DraftConfig(**read_fields(found, lookup))


def read_fields(found: Checkpoint, lookup: Lookup) -> dict[str, Any]:
    """Everything but the heads of later networks."""
    fields.refuse_other_mathematics(found, lookup)
    fields.full_vocabulary(lookup)
    return {
        **fields.geometry(lookup),
        **fields.block(lookup),
        **fields.rope(lookup),
        **fields.attention(found, lookup),
        **fields.scales(lookup),
        **fields.own_embedding_and_head(found, lookup),
        "target_layer_ids": fields.taps(lookup),
        "draft_vocabulary_file": lookup.file_name("draft_vocabulary_file"),
        "anchor_predicts": fields.anchor_predicts(lookup, False, "DFlash: the anchor slot does not predict"),
    }


def write_config(config: DraftConfig) -> dict[str, Any]:
    """The config.json of a DFlash or DFlash 2 draft, with what is out of the ordinary spelled out."""
    if config.kind == "dspark":
        raise UnsupportedModel("z-lab's layout has no DSpark heads; convert this draft to speculators instead.")
    nested: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    if config.draft_vocabulary_file is not None:
        nested["draft_vocabulary_file"] = config.draft_vocabulary_file
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        if config.kind == "dflash2":
            nested[key] = getattr(config, key)
    return {
        "architectures": [ARCHITECTURE if config.kind == "dflash" else DFLASH2_ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": config.block_size,
        NESTED: nested | _unusual(config),
        **shape_keys(config),
        "rope_theta": config.rope_theta,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_target_layers,
        **attention_keys(config),
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "dtype": "bfloat16",
    }


def _unusual(config: DraftConfig) -> dict[str, Any]:
    """Keys of `dflash_config` that plain drafts leave out."""
    keys: dict[str, Any] = {}
    if config.input_embedding_scale != 1:
        keys["input_embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1:
        keys["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcapping is not None:
        keys["final_logit_softcapping"] = config.final_logit_softcapping
    if config.anchor_predicts:
        keys["sample_from_anchor"] = True
    if config.target_hidden_size is not None:
        keys["target_hidden_size"] = config.target_hidden_size
    return keys


def attention_keys(config: DraftConfig) -> dict[str, Any]:
    """Kinds of layers, window, causality and rotary scaling. Raises UnsupportedModel for what the keys cannot say."""
    layers = [config.attention_of(number) for number in range(config.num_hidden_layers)]
    windows = {layer.window for layer in layers if layer.window is not None}
    causal = {layer.causal for layer in layers}
    by_rule = all(layer.causal == (layer.window is not None) for layer in layers)
    if len(windows) > 1 or (len(causal) > 1 and not by_rule) or (config.window_from_anchor and windows):
        raise UnsupportedModel(
            "this draft's windows or causality differ between layers in a way that z-lab's layout cannot say."
        )
    sliding = [layer.window is not None for layer in layers]
    keys: dict[str, Any] = {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding]}
    if windows:
        keys |= {"sliding_window": windows.pop(), "use_sliding_window": True}
    if len(causal) == 1 and (any(sliding) or True in causal):
        keys["is_causal"] = causal.pop()
    if any(layer.sinks for layer in layers):
        keys["attention_sink_bias"] = True
    if config.rope_interleaved:
        keys["rope_is_neox_style"] = False
    return keys | _rope_keys(config)


def _rope_keys(config: DraftConfig) -> dict[str, Any]:
    if config.sliding_rope_theta is not None:
        raise UnsupportedModel(
            "this draft has another rotary base in its sliding layers, which this layout cannot say."
        )
    if config.yarn is None:
        return {}
    yarn = config.yarn
    return {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
            "attention_factor": yarn.attention_factor,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        }
    }


def canonical(name: str) -> str:
    """`midlayer.` is an alias of the only layer."""
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


DIALECT = Dialect(
    name="z-lab",
    matches=lambda found: True,  # the last one asked: what is missing is named by the reader
    resolve=resolve,
    canonical=canonical,
    write=write_config,
)
