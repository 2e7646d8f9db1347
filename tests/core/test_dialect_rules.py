"""The rules that checkpoint dialects differ in: ids of taps, anchor layout, causality, windows, rotary bases.

Each row of a table is one way in which a published reader went wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash.core.draft_reader import parse_draft_config
from dflash.errors import CheckpointError, UnsupportedModel
from tests.core.dialect_cases import (
    CASES,
    HEADS,
    IDS,
    SLIDES,
    TRANSFORMERS,
    proposing,
    read,
    speculators,
)
from tests.core.draft_folders import BLOCK, FULL, LAYERS, PLAIN, TAPS, Tensors, v1_tensors


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
