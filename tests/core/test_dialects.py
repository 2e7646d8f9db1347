"""Every dialect ends in the same description: ids, anchor layout, causality, rotary base, heads, vocabulary.

The configs are written by hand from what each program writes. A misread value loads cleanly and only costs speed, so
each rule has a case that a plausible other reading would fail.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dflash.core.draft_config import DraftConfig, LayerAttention, Yarn
from dflash.core.draft_reader import DraftDescription, dialect_named, parse_draft_config, read_draft
from dflash.errors import CheckpointError, ConfigError, UnsupportedModel
from dflash.registry import DIALECTS
from tests.core.draft_folders import (
    BLOCK,
    CONFIDENCE,
    CONVOLUTIONS,
    FULL,
    LAYERS,
    MARKOV,
    MASK,
    OWN,
    PLAIN,
    SELECTOR,
    SIZES,
    TAPS,
    H,
    Tensors,
    V,
    table,
    tensors,
    v1_tensors,
    write_draft,
)

V1 = DraftConfig(
    **SIZES, rope_theta=1e6, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=TAPS, num_target_layers=36
)
IDS: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
SLIDES = ["sliding_attention"] * LAYERS


def changed(**values: Any) -> DraftConfig:
    return dataclasses.replace(V1, **values)


DSPARK = changed(
    anchor_predicts=True, markov_rank=6, markov_head="vanilla", confidence_head=True, confidence_with_markov=True
)
HEADS: dict[str, Any] = {
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def speculators(**values: Any) -> dict[str, Any]:
    """What Speculators 0.5 writes for a dflash draft, with changes at the top level."""
    inner = {**SIZES, "model_type": "qwen3", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    method = {"proposal_type": "greedy", "speculative_tokens": BLOCK - 1, "verifier_accept_k": 1}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [method],
            "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": inner | {"layer_types": FULL, "use_sliding_window": False},
        "draft_vocab_size": V,
        "block_size": BLOCK,
        "num_target_layers": 36,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        "sliding_window_non_causal": False,
        **values,
    }


def proposing(width: int | None, algorithm: str = "dflash", **values: Any) -> dict[str, Any]:
    """A Speculators config made to propose `width` tokens."""
    config = speculators(speculators_model_type=algorithm, **values)
    method = {"proposal_type": "greedy", "verifier_accept_k": 1}
    config["speculators_config"] = {
        "algorithm": algorithm,
        "proposal_methods": [method if width is None else method | {"speculative_tokens": width}],
    }
    return config


MODELOPT = {name.removeprefix("markov_head."): entry for name, entry in MARKOV.items()} | tensors(
    confidence_proj__weight=(1, H + 6), confidence_proj__bias=(1,)
)
SINKS = {f"layers.{number}.self_attn.attention_sink_bias": ("BF16", (4,)) for number in range(LAYERS)}
ENCODER = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
TRANSFORMERS: Tensors = {ENCODER.get(name, name): entry for name, entry in v1_tensors().items()}

CASES: dict[str, tuple[str, dict[str, Any], Tensors, DraftConfig]] = {
    "z-lab nested": ("z-lab", {**PLAIN, "dflash_config": IDS, "layer_types": FULL}, v1_tensors(), V1),
    "z-lab flat": ("z-lab", {**PLAIN, **IDS, "architectures": ["DFlashDraftModel"]}, v1_tensors(), V1),
    "z-lab all nested": (
        "z-lab",
        {**SIZES, "num_target_layers": 36, "rope_theta": 1e6, "dflash_config": IDS | {"block_size": BLOCK}},
        v1_tensors(),
        V1,
    ),
    "z-lab with both lists of ids": (
        "z-lab",
        {**PLAIN, **IDS, "eagle_aux_hidden_state_layer_ids": [2, 10, 18]},
        v1_tensors(),
        V1,
    ),
    "attention biases": (
        "z-lab",
        {**PLAIN, **IDS, "attention_bias": True},
        v1_tensors()
        | {
            f"layers.{number}.self_attn.{name}.bias": ("BF16", (size,))
            for number in range(LAYERS)
            for name, size in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16), ("o_proj", H))
        },
        changed(attention_bias=True),
    ),
    "scales": (
        "z-lab",
        {**PLAIN, **IDS, "dflash_config": {"output_multiplier": 0.25}, "input_embedding_scale": 4, "hidden_act": "silu"}
        | {"final_logit_softcapping": 30.0},
        v1_tensors(),
        changed(output_multiplier=0.25, input_embedding_scale=4.0, final_logit_softcapping=30.0),
    ),
    "midlayer": (
        "z-lab",
        {**PLAIN, **IDS, "num_hidden_layers": 1},
        {
            name.replace("layers.0.", "midlayer."): entry
            for name, entry in v1_tensors().items()
            if not name.startswith("layers.1.")
        },
        changed(num_hidden_layers=1),
    ),
    "dflash2": (
        "dflash2",
        {**PLAIN, "is_causal": False, "layer_types": SLIDES, "sliding_window": 64, "use_sliding_window": True}
        | {"dflash_config": IDS | {"conv_kernel_size": 2, "conv_group_size": 8}, "selector_rank": 5}
        | {"selector_top_k": 4, "architectures": ["DFlash2DraftModel"]},
        v1_tensors() | CONVOLUTIONS | SELECTOR,
        changed(
            layer_attention=(LayerAttention(window=64),) * LAYERS,
            conv_kernel_size=2,
            conv_group_size=8,
            selector_rank=5,
            selector_top_k=4,
        ),
    ),
    "dflash2 with another program's codebook names": (
        "dflash2",
        {**PLAIN, "dflash_config": IDS, "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5}
        | {"selector_top_k": 4},
        v1_tensors()
        | CONVOLUTIONS
        | {name + ("" if name.endswith("weight") else ".weight"): entry for name, entry in SELECTOR.items()},
        changed(conv_kernel_size=2, conv_group_size=8, selector_rank=5, selector_top_k=4),
    ),
    "deepspec dspark": (
        "deepspec",
        {**PLAIN, **IDS, **HEADS, "architectures": ["Qwen3DSparkModel"], "layer_types": FULL, "num_anchors": 512},
        v1_tensors() | OWN | MARKOV | CONFIDENCE,
        dataclasses.replace(DSPARK, owns_embedding=True, owns_head=True),
    ),
    "deepspec dflash block7: v1 whose anchor predicts": (
        "deepspec",
        {**PLAIN, **IDS, "architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "enable_confidence_head": False},
        v1_tensors() | OWN,
        changed(anchor_predicts=True, owns_embedding=True, owns_head=True),
    ),
    "specforge dspark": (
        "specforge",
        {**PLAIN, "dflash_config": IDS | HEADS | {"projector_type": "dspark"}, "architectures": ["DSparkDraftModel"]}
        | {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192}},
        v1_tensors() | MARKOV | CONFIDENCE,
        dataclasses.replace(
            DSPARK, yarn=Yarn(factor=32.0, original_max_position_embeddings=8192, attention_factor=1.3465735902799727)
        ),
    ),
    "modelopt dspark": (
        "modelopt",
        {
            **PLAIN,
            "dflash_config": IDS | {"projector_type": "dspark", "use_confidence_head": True, "shift_label": True},
        },
        v1_tensors() | MODELOPT,
        DSPARK,
    ),
    "modelopt dspark that keeps the anchor": (
        "modelopt",
        {**PLAIN, "dflash_config": IDS | {"projector_type": "dspark", "use_confidence_head": True}},
        v1_tensors() | MODELOPT,
        dataclasses.replace(DSPARK, anchor_predicts=False),
    ),
    "lfm2 dspark": (
        "lfm2",
        {**PLAIN, "dflash_config": IDS, "architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False},
        v1_tensors() | OWN | MARKOV | CONFIDENCE,
        dataclasses.replace(DSPARK, owns_embedding=True, owns_head=True, rope_interleaved=True),
    ),
    "nemotron dspark": (
        "nemotron",
        {**PLAIN, **IDS, **HEADS, "architectures": ["Qwen3DSparkModel"], "dflash_query_causal": True}
        | {"attention_sink_bias": True, "has_lm_head": False, "sample_from_anchor": False, "sliding_window": 64}
        | {"eagle_aux_hidden_state_layer_ids": [2, 10, 18]},
        v1_tensors() | MARKOV | CONFIDENCE | SINKS | {"embed_tokens.weight": OWN["embed_tokens.weight"]},
        dataclasses.replace(
            DSPARK,
            anchor_predicts=False,
            owns_embedding=True,
            layer_attention=(LayerAttention(window=64, causal=True, sinks=True),) * LAYERS,
        ),
    ),
    "speculators dflash": ("speculators", speculators(), v1_tensors(), V1),
    "speculators with frozen copies": (
        "speculators",
        speculators(),
        v1_tensors() | OWN | tensors(verifier_norm__weight=(H,), verifier_lm_head__weight=(V, H)),
        changed(owns_embedding=True, owns_head=True),
    ),
    "speculators sliding": (
        "speculators",
        speculators(
            transformer_layer_config=speculators()["transformer_layer_config"]
            | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "use_sliding_window": True}
        ),
        v1_tensors(),
        changed(layer_attention=(LayerAttention(window=64, causal=True), LayerAttention()), window_from_anchor=True),
    ),
    "speculators dspark": (
        "speculators",
        proposing(BLOCK, "dspark", **HEADS),
        v1_tensors() | MARKOV | CONFIDENCE,
        DSPARK,
    ),
    "transformers": (
        "transformers",
        {**SIZES, **IDS, "model_type": "muse_glimmer_assistant", "block_size": BLOCK, "layer_types": FULL}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "num_target_layers": 36},
        TRANSFORMERS,
        V1,
    ),
    "transformers sliding": (
        "transformers",
        {**PLAIN, **IDS, "model_type": "muse_glimmer_assistant", "layer_types": SLIDES, "sliding_window": 64},
        TRANSFORMERS,
        changed(layer_attention=(LayerAttention(window=64),) * LAYERS),
    ),
}


def read(folder: Path, config: dict[str, Any], held: Tensors, data: dict[str, bytes] | None = None) -> DraftDescription:
    return read_draft(write_draft(folder / "draft", config, held, data))


@pytest.mark.parametrize("case", CASES)
def test_every_dialect_resolves_to_one_description(case: str, tmp_path: Path) -> None:
    """Guards against a loader that reads another layout's keys by its own habits."""
    dialect, config, held, expected = CASES[case]
    found = read(tmp_path, config, held)
    assert (found.dialect, found.config) == (dialect, expected)
    assert set(found.stored_names.values()) <= set(held)
    assert found.vocabulary is None
    assert found.origins["block_size"], "where a value came from is part of the answer"


def test_every_dialect_has_a_case() -> None:
    """Guards against a dialect that is registered and never read."""
    assert {dialect for dialect, *_ in CASES.values()} == set(DIALECTS) - {"refused"}


@pytest.mark.parametrize("case", CASES)
def test_the_tensor_check_is_strict_both_ways(case: str, tmp_path: Path) -> None:
    """Guards against a draft with a hole or a surplus, in every dialect."""
    _, config, held, _ = CASES[case]
    with pytest.raises(CheckpointError, match=r"layers\.9\.extra"):
        read(tmp_path / "more", config, held | {"layers.9.extra": ("BF16", (2,))})
    shape = held["norm.weight"][1]
    with pytest.raises(CheckpointError, match=r"norm\.weight has shape"):
        read(tmp_path / "other", config, held | {"norm.weight": ("BF16", (shape[0] + 1,))})
    lost = {name: entry for name, entry in held.items() if name != "norm.weight"}
    with pytest.raises(CheckpointError, match=r"lacks norm\.weight"):
        read(tmp_path / "less", config, lost)


@pytest.mark.parametrize(
    ("config", "held", "expected"),
    [
        ({**PLAIN, **IDS, "target_layer_ids": [1, 9, 35]}, v1_tensors(), (1, 9, 35)),
        ({**PLAIN, **IDS, "num_target_layers": None}, v1_tensors(), TAPS),
        (speculators(aux_hidden_state_layer_ids=[2, 10, 18]), v1_tensors(), (1, 9, 17)),
        (speculators(aux_hidden_state_layer_ids=[1, 2, 36]), v1_tensors(), (0, 1, 35)),
        ({**CASES["transformers"][1], "target_layer_ids": [0, 9, 17]}, TRANSFORMERS, (0, 9, 17)),
        (CASES["deepspec dspark"][1], CASES["deepspec dspark"][2], TAPS),
        (CASES["nemotron dspark"][1], CASES["nemotron dspark"][2], TAPS),
    ],
)
def test_layer_ids_mean_outputs(
    config: dict[str, Any], held: Tensors, expected: tuple[int, ...], tmp_path: Path
) -> None:
    """Guards against the classic off-by-one between the output of a layer and the residual that enters it."""
    assert read(tmp_path, config, held).config.target_layer_ids == expected


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({**PLAIN, **IDS, "target_layer_ids": [-1, 9, 17]}, CheckpointError, "increasing layer numbers from 0"),
        ({**PLAIN, **IDS, "target_layer_ids": [-2, 9, 17]}, CheckpointError, "increasing layer numbers from 0"),
        (CASES["deepspec dspark"][1] | {"target_layer_ids": [-1, 9, 17]}, UnsupportedModel, "embedding output"),
        (CASES["deepspec dspark"][1] | {"target_layer_ids": [-2, 9, 17]}, CheckpointError, "increasing layer numbers"),
        (speculators(aux_hidden_state_layer_ids=[0, 9, 17]), UnsupportedModel, "embedding output"),
        (speculators(aux_hidden_state_layer_ids=[1, 9, 37]), CheckpointError, "tap 36 does not exist"),
        (speculators(aux_hidden_state_layer_ids=None), CheckpointError, "'aux_hidden_state_layer_ids'.*never guessed"),
        (CASES["nemotron dspark"][1] | {"eagle_aux_hidden_state_layer_ids": [1, 9, 17]}, CheckpointError, "plus one"),
    ],
)
def test_layer_ids_that_wrap_or_contradict(config: dict[str, Any], error: type[Exception], words: str) -> None:
    """Guards against Python's negative indices, which read another layer, and against two lists that disagree."""
    with pytest.raises(error, match=words):
        parse_draft_config(config, source="config.json")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (proposing(BLOCK - 1), False),
        (proposing(BLOCK), True),
        (proposing(BLOCK - 1, "dspark", **HEADS), False),
        (proposing(BLOCK - 1, "dspark", sample_from_anchor=True, **HEADS), False),
        (proposing(BLOCK, "dspark", sample_from_anchor=False, **HEADS), True),
        (proposing(None), False),
        (proposing(None, "dspark", **HEADS), True),
        (proposing(3, "dspark", sample_from_anchor=False, **HEADS), False),
        (proposing(3, sample_from_anchor=True), True),
        ({**PLAIN, **IDS}, False),
        ({**PLAIN, **IDS, "sample_from_anchor": True}, True),
        ({**PLAIN, **IDS, "logits_start": 0}, True),
        ({**PLAIN, **IDS, "dflash_config": {"shift_label": True}}, True),
        (CASES["deepspec dspark"][1], True),
        (CASES["deepspec dspark"][1] | {"sample_from_anchor": False}, False),
    ],
)
def test_anchor_layout(config: dict[str, Any], expected: bool) -> None:
    """Guards against the second classic: same tensors, same names, every draft shifted by one position."""
    resolved = parse_draft_config(config, source="config.json")
    assert resolved.anchor_predicts == expected
    assert resolved.max_proposal == (BLOCK if expected else BLOCK - 1)


def test_anchor_keys_that_disagree() -> None:
    """Guards against picking one of two contradicting keys."""
    with pytest.raises(CheckpointError, match="both that the anchor slot predicts"):
        parse_draft_config({**PLAIN, **IDS, "sample_from_anchor": True, "logits_start": 1}, source="config.json")


MIXED = ["sliding_attention", "full_attention"]
W = {"sliding_window": 64}


@pytest.mark.parametrize(
    ("keys", "windows", "causal"),
    [
        ({}, (None, None), (False, False)),
        ({"is_causal": True}, (None, None), (True, True)),
        ({"layer_types": MIXED, **W}, (64, None), (True, False)),
        ({"layer_types": MIXED, **W, "is_causal": False}, (64, None), (False, False)),
        ({"layer_types": MIXED, **W, "is_causal": True}, (64, None), (True, True)),
        ({"layer_types": SLIDES, **W, "dflash_config": {**IDS, "causal": False}}, (64, 64), (False, False)),
        ({"dflash_config": {**IDS, "use_swa": True, "swa_window_size": 32}, **W}, (32, 32), (False, False)),
        ({"dflash_config": {**IDS, "use_swa": True}, "layer_types": FULL, **W}, (64, 64), (False, False)),
        ({"dflash_config": {**IDS, "use_swa": True}, "layer_types": MIXED, **W}, (64, None), (True, False)),
        ({"dflash_query_causal": True}, (None, None), (True, True)),
        ({"use_sliding_window": False, **W}, (None, None), (False, False)),
    ],
)
def test_causality_and_windows(keys: dict[str, Any], windows: tuple[Any, ...], causal: tuple[bool, ...]) -> None:
    """Guards against a block run causal though trained bidirectional, or the reverse, and against a missed window."""
    config = parse_draft_config({**PLAIN, **({} if "dflash_config" in keys else IDS), **keys}, source="config.json")
    layers = [config.attention_of(number) for number in range(LAYERS)]
    assert tuple(layer.window for layer in layers) == windows
    assert tuple(layer.causal for layer in layers) == causal


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layer_types": SLIDES}, "'swa_window_size'|'sliding_window'"),
        ({"layer_types": SLIDES, "sliding_window": BLOCK - 1}, "smaller than the block"),
        ({"layer_types": SLIDES, **W, "use_sliding_window": False}, "use_sliding_window false"),
        ({"use_sliding_window": True, **W}, "no layer_types"),
        ({"layer_types": ["full_attention"]}, "1 entries"),
        ({"is_causal": True, "dflash_query_causal": False}, "twice and differently"),
        ({"is_causal": "yes"}, "true or false"),
    ],
)
def test_attention_keys_that_contradict(keys: dict[str, Any], words: str) -> None:
    """Guards against guessing which of two statements holds."""
    with pytest.raises(CheckpointError, match=words):
        parse_draft_config({**PLAIN, **IDS, **keys}, source="config.json")


def test_rotary_base_per_kind_of_layer() -> None:
    """Guards against one base for layers that were trained with two; Speculators uses the sliding one everywhere."""
    rope = {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}}
    config = {**PLAIN, **IDS, "rope_theta": None, "layer_types": MIXED, **W, **rope}
    resolved = parse_draft_config(config, source="config.json")
    assert (resolved.rope_theta_of(0), resolved.rope_theta_of(1)) == (1e4, 1e6)
    inner = speculators()["transformer_layer_config"] | rope
    resolved = parse_draft_config(speculators(transformer_layer_config=inner), source="config.json")
    assert (resolved.rope_theta, resolved.sliding_rope_theta) == (1e4, None)


def test_yarn_of_a_copied_config_is_refused() -> None:
    """Guards against scaling that a stock DeepSpec config merely copied from its target."""
    scaled = {"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}}
    with pytest.raises(UnsupportedModel, match="copied from its target"):
        parse_draft_config(CASES["deepspec dspark"][1] | scaled, source="config.json")


KEPT = [0, 5, 6, 40, 95]
REDUCED = v1_tensors() | tensors(embed_tokens__weight=(V, H), lm_head__weight=(len(KEPT), H))
TABLES: Tensors = {"d2t": ("I64", (len(KEPT),)), "t2d": ("BOOL", (V,))}


def test_reduced_vocabulary_is_a_table_of_offsets(tmp_path: Path) -> None:
    """Guards against d2t read as ids: row 3 stands for 3 + 37 = 40."""
    config = speculators(draft_vocab_size=len(KEPT))
    found = read(tmp_path, config, REDUCED | TABLES, table(KEPT))
    assert found.vocabulary == tuple(KEPT)
    assert found.config.draft_vocab_size == len(KEPT)
    spark = proposing(BLOCK, "dspark", draft_vocab_size=len(KEPT), **HEADS)
    heads = MARKOV | CONFIDENCE | tensors(markov_head__markov_w2__weight=(len(KEPT), 6))
    assert read(tmp_path / "spark", spark, REDUCED | TABLES | heads, table(KEPT)).vocabulary == tuple(KEPT)


@pytest.mark.parametrize(
    ("size", "held", "data", "words"),
    [
        (5, REDUCED, {}, "no table d2t"),
        (V, v1_tensors() | TABLES, table(KEPT), "whole vocabulary"),
        (5, v1_tensors() | TABLES, table(KEPT), r"lacks lm_head\.weight"),
        (
            5,
            REDUCED | TABLES,
            {"d2t": table([0, 5, 6, 40, 95])["d2t"], "t2d": table([0, 5, 6, 41, 95])["t2d"]},
            "differ",
        ),
        (5, REDUCED | {"d2t": ("I64", (5,))}, {"d2t": bytes(32) + (93).to_bytes(8, "little")}, "below 97"),
        (5, REDUCED | {"d2t": ("I64", (5,))}, {"d2t": bytes(32) + (2**64 - 2).to_bytes(8, "little")}, "increasing"),
        (5, REDUCED | {"d2t": ("F32", (5,))}, {}, "integers belong"),
        (5, REDUCED | {"d2t": ("I64", (4,))}, {}, r"has \[4\] rows"),
    ],
)
def test_reduced_vocabularies_that_cannot_be_right(
    size: int, held: Tensors, data: dict[str, bytes], words: str, tmp_path: Path
) -> None:
    """Guards against rows of a head that stand for unknown or wrong tokens."""
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path, speculators(draft_vocab_size=size), held, data)


REFUSED: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "DSpine by key": ({**PLAIN, **IDS, "dspine_config": {"r": 1024}}, v1_tensors(), "DSpine"),
    "DSpine by tensors": ({**PLAIN, **IDS}, v1_tensors() | tensors(injection__bias=(5,)), "DSpine"),
    "Domino": ({**PLAIN, "dflash_config": IDS | {"projector_type": "domino"}}, v1_tensors(), "Domino"),
    "embedded": ({**PLAIN, "dspark_target_layer_ids": [1]}, v1_tensors(), "target model with a DSpark draft"),
    "Laguna": ({**PLAIN, **IDS}, tensors(layers__0__self_attn__qkv_proj__weight=(3, 3)), "Laguna"),
    "gated": ({**PLAIN, **IDS}, v1_tensors() | tensors(layers__0__self_attn__g_proj__weight=(3, 3)), "Laguna"),
    "Gemma": ({**PLAIN, **IDS, "architectures": ["Gemma4DSparkModel"]}, v1_tensors(), "Gemma 4's layers"),
    "Qwen3.5": ({**PLAIN, **IDS, "architectures": ["Qwen35DSparkModel"]}, v1_tensors(), "offset norms"),
    "EAGLE": ({**PLAIN, **IDS, "architectures": ["LlamaForCausalLMEagle3"]}, v1_tensors(), "EAGLE"),
    "Speculators EAGLE": (proposing(3, "eagle3"), v1_tensors(), "'eagle3'"),
    "lossy": (
        speculators(speculators_config={"algorithm": "dflash", "proposal_methods": [{"verifier_accept_k": 3}]}),
        v1_tensors(),
        "lossy acceptance",
    ),
    "quantised by key": ({**PLAIN, **IDS, "quantization_config": {"quant_algo": "NVFP4"}}, v1_tensors(), "quantised"),
    "noise levels": ({**PLAIN, **IDS, "log_snr_conditioning": True}, v1_tensors(), "noise-level"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    """Guards against another network's weights that happen to fit."""
    config, held, words = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=words):
        read(tmp_path, config, held)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"markov_rank": 7}, "the weights show 6"),
        ({"markov_head_type": "gated"}, "the weights show 'vanilla'"),
        ({"enable_confidence_head": False}, "the weights show True"),
        ({"confidence_head_with_markov": False}, "the weights show True"),
    ],
)
def test_dspark_keys_must_fit_the_tensors(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Guards against a head that is there and not used, or used and not there."""
    _, config, held, _ = CASES["deepspec dspark"]
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path, config | changes, held)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_kinds_of_markov_heads(kind: str, tmp_path: Path) -> None:
    """Guards against a gate or a recurrence that is left out."""
    _, config, held, expected = CASES["deepspec dspark"]
    extra = (
        tensors(markov_head__gate_proj__weight=(6, H + 6), markov_head__gate_proj__bias=(6,))
        if kind == "gated"
        else tensors(markov_head__joint_proj__weight=(18, 12 + H), markov_head__joint_proj__bias=(18,))
    )
    found = read(tmp_path, config | {"markov_head_type": kind}, held | extra)
    assert found.config == dataclasses.replace(expected, markov_head=kind)


@pytest.mark.parametrize("name", ["z-lab", "transformers", "speculators"])
def test_what_is_written_reads_back(name: str) -> None:
    """Guards against a key that is written and not read, or the reverse."""
    dialect = dialect_named(name)
    assert dialect.write is not None
    assert parse_draft_config(dialect.write(V1), source="x") == V1
    biased = changed(layer_attention=(LayerAttention(window=64, causal=True), LayerAttention()))
    if name == "z-lab":
        assert parse_draft_config(dialect.write(biased), source="x") == biased
    else:
        with pytest.raises(UnsupportedModel):
            dialect.write(biased)


def test_an_unknown_layout_is_named() -> None:
    """Guards against a traceback for a mistyped layout."""
    with pytest.raises(ConfigError, match="speculators, transformers, z-lab"):
        dialect_named("eagle")
