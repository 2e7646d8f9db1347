"""Speculators (vllm-project/speculators) `dflash` and `dspark`: layers under `transformer_layer_config`, taps as the
residuals that enter a layer, often a head for a part of the vocabulary with the table `d2t`.

The target's embedding and full head are usually left out of the file; norms and heads that only its training uses are
skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash.core.dialects import fields
from dflash.core.dialects.base import TOP, Checkpoint, Dialect, Lookup
from dflash.core.dialects.written import rope_parameters, shape_keys
from dflash.core.draft_config import DraftConfig, LayerAttention
from dflash.errors import CheckpointError, UnsupportedModel

LAYERS = "transformer_layer_config"
DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"
TRAINING_ONLY = ("verifier_norm.weight", "verifier_lm_head.weight", DRAFT_TO_TARGET, TARGET_TO_DRAFT)
"""Tensors that are no part of the network."""


def matches(found: Checkpoint) -> bool:
    """By the keys that only it writes."""
    return "speculators_config" in found.raw or "speculators_model_type" in found.raw


def resolve(found: Checkpoint, lookup: Lookup) -> DraftConfig:
    """Read a Speculators draft."""
    algorithm = _algorithm(found, lookup)
    inner = Lookup(found.source, ((LAYERS, found.level(LAYERS)),), lookup.origins, lookup.notes)
    fields.refuse_other_mathematics(found, inner)
    values = {
        **fields.geometry(inner),
        **fields.block(lookup),
        **fields.rope(inner, sliding_for_all=True),
        **_attention(found, lookup, inner),
        **fields.scales(lookup),
        **fields.own_embedding_and_head(found, lookup),
        "target_layer_ids": _taps(lookup),
        "anchor_predicts": _anchor_predicts(found, lookup, algorithm),
    }
    if algorithm == "dspark":
        values |= fields.markov(found, lookup, values["hidden_size"])
    size = lookup.integer("draft_vocab_size")
    if size != values["vocab_size"]:
        values |= {"draft_vocab_size": size, "owns_head": True}  # a missing head is then a missing tensor
    _check_table(found, size != values["vocab_size"])
    return DraftConfig(**values)


def _algorithm(found: Checkpoint, lookup: Lookup) -> str:
    stated = {found.raw.get("speculators_model_type"), found.level("speculators_config").get("algorithm")} - {None}
    if len(stated) != 1:
        raise CheckpointError(f"{found.source} states the algorithms {sorted(map(str, stated))}; keep the right one.")
    algorithm = stated.pop()
    if algorithm not in ("dflash", "dspark"):
        raise UnsupportedModel(
            f"{found.source} is a Speculators draft for {algorithm!r}; this version runs its dflash and dspark drafts."
        )
    if lookup.find("projector_type") not in (None, "dflash"):
        raise UnsupportedModel(
            f"{found.source} asks for the projector {lookup.find('projector_type')!r}, which is not here."
        )
    return str(algorithm)


def _taps(lookup: Lookup) -> tuple[int, ...]:
    key = "aux_hidden_state_layer_ids"
    return fields.taps_from_inputs(lookup, key, lookup.integers(key))


def proposal_method(found: Checkpoint) -> Mapping[str, Any]:
    """The first way of proposing that the checkpoint names; {} without one. Raises UnsupportedModel for lossy
    acceptance."""
    methods = found.level("speculators_config").get("proposal_methods") or [{}]
    if not isinstance(methods, list) or not all(isinstance(method, Mapping) for method in methods):
        raise CheckpointError(f"{found.source}: proposal_methods must be a list of objects.")
    for method in methods:
        if method.get("verifier_accept_k") not in (None, 1):
            raise UnsupportedModel(
                f"{found.source} asks for lossy acceptance (verifier_accept_k {method['verifier_accept_k']}), which is "
                "never done here; take the key out to use the draft losslessly."
            )
    first: Mapping[str, Any] = methods[0]
    return first


def _anchor_predicts(found: Checkpoint, lookup: Lookup, algorithm: str) -> bool:
    """By the width that the checkpoint was made to propose, then the key, then the algorithm's habit: heads from before
    the key keep the anchor and say so by that width only."""
    width, block_size = proposal_method(found).get("speculative_tokens"), lookup.integer("block_size")
    if isinstance(width, int) and block_size - width in (0, 1):
        lookup.decided("anchor_predicts", f"speculative_tokens {width} of block_size {block_size}")
        said = lookup.flag("sample_from_anchor")
        if said is not None and said != (width == block_size):
            lookup.notes.append(f"sample_from_anchor {str(said).lower()} is overruled by speculative_tokens {width}")
        return width == block_size
    return fields.anchor_predicts(lookup, algorithm == "dspark", f"Speculators {algorithm}")


def _attention(found: Checkpoint, lookup: Lookup, inner: Lookup) -> dict[str, Any]:
    """Full layers see their whole block; sliding ones only earlier slots, unless the config says otherwise. The window
    is the same for all slots of a block."""
    both_ways = bool(lookup.flag("sliding_window_non_causal"))
    read = fields.attention(found, inner)
    layers = [
        LayerAttention(window=layer.window, causal=layer.window is not None and not both_ways)
        for layer in read["layer_attention"]
    ]
    lookup.decided("causal", f"sliding_window_non_causal {str(both_ways).lower()}")
    slides = any(layer.window is not None for layer in layers)
    return read | {"layer_attention": tuple(layers), "window_from_anchor": slides}


def _check_table(found: Checkpoint, reduced: bool) -> None:
    if found.shapes is None:
        return
    if reduced and DRAFT_TO_TARGET not in found.shapes:
        raise CheckpointError(
            f"{found.source} has a reduced vocabulary, but the weights have no table {DRAFT_TO_TARGET}: the rows of "
            "its head stand for unknown tokens. Download or export the draft again."
        )
    if not reduced and DRAFT_TO_TARGET in found.shapes:
        raise CheckpointError(
            f"{found.source}: the weights have a table {DRAFT_TO_TARGET}, but draft_vocab_size is the whole "
            "vocabulary; config.json and weights do not belong together."
        )


def write_config(config: DraftConfig) -> dict[str, Any]:
    """The config.json of a DFlash or DSpark draft. Raises UnsupportedModel for what Speculators cannot say."""
    layers = [config.attention_of(number) for number in range(config.num_hidden_layers)]
    sliding = [layer for layer in layers if layer.window is not None]
    impossible = {
        "convolutions or a selector": config.kind == "dflash2",
        "a causal block in full layers": any(layer.causal for layer in layers if layer.window is None),
        "attention sinks": any(layer.sinks for layer in layers),
        "several windows, or causality that differs between sliding layers": len(set(sliding)) > 1,
        "a window that moves along the block": bool(sliding) and not config.window_from_anchor,
        "interleaved rotary pairs": config.rope_interleaved,
        "scaled embeddings or logits": (config.input_embedding_scale, config.output_multiplier) != (1, 1)
        or config.final_logit_softcapping is not None,
        "several rotary bases": config.sliding_rope_theta is not None,
    }
    if asked := [what for what, has in impossible.items() if has]:
        raise UnsupportedModel(f"Speculators' layout cannot say {asked[0]}, which this draft has.")
    algorithm = "dspark" if config.kind == "dspark" else "dflash"
    values: dict[str, Any] = {
        "architectures": ["DSparkSpeculator" if algorithm == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": algorithm,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": config.anchor_predicts,
        "sliding_window_non_causal": bool(sliding) and not sliding[0].causal,
        "target_hidden_size": config.target_hidden_size,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.max_proposal, "verifier_accept_k": 1}
            ],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        LAYERS: _write_layers(config, layers),
        "dtype": "bfloat16",
    }
    if algorithm == "dspark":
        values |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head or "vanilla",
            "enable_confidence_head": config.confidence_head,
            "confidence_head_with_markov": config.confidence_with_markov,
        }
    return values


def _write_layers(config: DraftConfig, layers: list[LayerAttention]) -> dict[str, Any]:
    windows = [layer.window for layer in layers if layer.window is not None]
    return {
        "model_type": "qwen3",
        **shape_keys(config),
        "rope_parameters": rope_parameters(config),
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "layer_types": ["full_attention" if layer.window is None else "sliding_attention" for layer in layers],
        "sliding_window": windows[0] if windows else None,
        "use_sliding_window": bool(windows),
        "max_position_embeddings": 32768,
    }


DIALECT = Dialect(
    name="speculators",
    matches=matches,
    resolve=resolve,
    levels=lambda found: ((TOP, found.raw),),
    canonical=lambda name: None if name in TRAINING_ONLY else name,
    write=write_config,
)
