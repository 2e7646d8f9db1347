"""Every dialect ends in the same description: ids, anchor layout, causality, rotary base, heads, vocabulary.

The configs are written by hand from what each program writes. A misread value loads cleanly and only costs speed, so
each rule has a case that a plausible other reading would fail.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dflash.core.draft_config import LayerAttention
from dflash.core.draft_reader import dialect_named, parse_draft_config
from dflash.errors import CheckpointError, ConfigError, UnsupportedModel
from dflash.registry import DIALECTS
from tests.core.dialect_cases import (
    CASES,
    HEADS,
    IDS,
    V1,
    changed,
    proposing,
    read,
    speculators,
)
from tests.core.draft_folders import (
    BLOCK,
    CONFIDENCE,
    MARKOV,
    PLAIN,
    H,
    Tensors,
    V,
    table,
    tensors,
    v1_tensors,
)


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
        (5, REDUCED | {"d2t": ("I64", (5,))}, {"d2t": bytes(32) + (93).to_bytes(8, "little")}, "97, outside"),
        (5, REDUCED | {"d2t": ("I64", (5,))}, {"d2t": bytes(32) + (2**64 - 2).to_bytes(8, "little")}, "list already"),
        (5, REDUCED | {"d2t": ("F32", (5,))}, {}, "integers belong"),
        (5, REDUCED | {"d2t": ("I64", (4,))}, {}, r"shape \[4\], but"),
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
    "EAGLE": ({**PLAIN, **IDS, "architectures": ["EagleLlamaModel"]}, v1_tensors(), "EAGLE"),
    "P-EAGLE": (proposing(3, "peagle"), v1_tensors(), "'peagle'"),
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
