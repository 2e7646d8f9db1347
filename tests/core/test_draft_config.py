"""The reader of draft configurations: every gap and contradiction is refused; a wrong guess would only cost speed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dflash.core.draft_config import CONFIG_FILE, DraftConfig
from dflash.core.draft_reader import parse_draft_config, read_draft_config, read_draft_vocabulary
from dflash.errors import CheckpointError, UnsupportedModel

NEEDED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "vocab_size",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
)
NOT_POSITIVE = [name for name in NEEDED if name not in ("mask_token_id", "target_layer_ids")]


def raw(**changes: Any) -> dict[str, Any]:
    """The published layout: ids nested, block_size and theta flat. A change to None takes the key out."""
    values: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 9, 17]},
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_types": ["full_attention"] * 2,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": 36,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 97,
    }
    nested = dict(values["dflash_config"])
    for key, value in changes.items():
        if key in nested:
            nested[key] = value
        else:
            values[key] = value
    if "dflash_config" not in changes:
        values["dflash_config"] = {key: value for key, value in nested.items() if value is not None}
    return {key: value for key, value in values.items() if value is not None}


def parse(**changes: Any) -> DraftConfig:
    return parse_draft_config(raw(**changes), source="config.json")


def nested(**values: Any) -> dict[str, Any]:
    """A `dflash_config` with further keys."""
    return {"mask_token_id": 90, "target_layer_ids": [1, 9, 17], **values}


EXPECTED = DraftConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    vocab_size=97,
    block_size=16,
    mask_token_id=90,
    target_layer_ids=(1, 9, 17),
    num_target_layers=36,
)


def test_published_layout_flat_and_nested() -> None:
    """Guards against reading one level only: the same values anywhere give the same description."""
    assert parse() == EXPECTED
    assert parse(block_size=None, dflash_config=nested(block_size=16)) == EXPECTED
    assert parse_draft_config(raw(dflash_config=None) | nested(), source="x") == EXPECTED
    both = raw(dflash_config=nested(block_size=16)) | {"mask_token_id": 90}
    assert parse_draft_config(both, source="x") == EXPECTED


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_key_is_named_and_never_guessed(key: str) -> None:
    """Guards against defaults: a guessed tap list or block size loads cleanly and halves the acceptance."""
    with pytest.raises(CheckpointError, match=f"'{key}'.*never guessed"):
        parse(**{key: None})


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids", "hidden_size", "num_target_layers"])
def test_two_levels_that_differ_are_refused(key: str) -> None:
    """Guards against picking one of two contradicting values."""
    other: dict[str, Any] = {"block_size": 8, "mask_token_id": 5, "target_layer_ids": [0, 9, 17]}
    values = raw() | {"dflash_config": nested(**({} if key in nested() else {key: 7}))}
    if key in nested():
        values[key] = other[key]
    with pytest.raises(CheckpointError, match=f"{key} twice and differently"):
        parse_draft_config(values, source="config.json")


@pytest.mark.parametrize("key", NOT_POSITIVE)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_must_be_positive(key: str, value: int) -> None:
    """Guards against a division by zero or an empty network in place of an error (block size 0 among them)."""
    with pytest.raises(CheckpointError, match=key):
        parse(**{key: value})


@pytest.mark.parametrize("key", NEEDED)
@pytest.mark.parametrize("value", ["7", 2.5, True, {"a": 1}, [1.0], [True]])
def test_values_of_another_type_are_refused(key: str, value: Any) -> None:
    """Guards against "16" or true passing for a number somewhere deep inside torch."""
    if key == "rms_norm_eps" and value == 2.5:
        return
    with pytest.raises(CheckpointError, match=key):
        parse(**{key: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 1}, "block_size is 1"),
        ({"target_layer_ids": []}, "target_layer_ids is empty"),
        ({"target_layer_ids": [-1, 5]}, "increasing layer numbers from 0"),
        ({"target_layer_ids": [9, 1]}, "increasing layer numbers"),
        ({"target_layer_ids": [1, 1]}, "increasing layer numbers"),
        ({"target_layer_ids": [1, 36]}, "tap 36 does not exist in a target of 36"),
        ({"mask_token_id": 97}, "outside the vocabulary of 97"),
        ({"mask_token_id": -1}, "outside the vocabulary"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"head_dim": 7}, "must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be positive"),
        ({"dflash_config": [1]}, "must be an object"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9, 17]}, "plus one"),
    ],
)
def test_contradictions_inside_a_config(changes: dict[str, Any], words: str) -> None:
    """Guards against ids that wrap around, taps in another order, off-by-one lists, ids outside the table."""
    with pytest.raises(CheckpointError, match=words):
        parse(**changes)


def test_the_shifted_list_of_other_engines_is_accepted() -> None:
    """Guards against refusing exports that state their taps in both conventions (z and z + 1)."""
    assert parse(eagle_aux_hidden_state_layer_ids=[2, 10, 18]) == EXPECTED


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}},
        {"rope_theta": None, "dflash_config": nested(rope_theta=1000000)},
        {"rope_scaling": {"rope_type": "default"}},
    ],
)
def test_rope_theta_wherever_it_stands(changes: dict[str, Any]) -> None:
    """Guards against a reader that knows one spelling and falls back to a default for the others."""
    assert parse(**changes).rope_theta == 1e6


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"rope_theta": None}, CheckpointError, "no safe default"),
        ({"rope_theta": None, "rope_parameters": {}}, CheckpointError, "no safe default"),
        ({"rope_parameters": {"rope_theta": 1e4}}, CheckpointError, "different rope_theta values"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e7}}}, CheckpointError, "different rope_theta values"),
        ({"rope_theta": 0}, CheckpointError, "rope_theta must be positive"),
        ({"rope_theta": "1e6"}, CheckpointError, "rope_theta must be a number"),
        ({"rope_parameters": 5}, CheckpointError, "rope_parameters must be an object"),
        ({"rope_parameters": {"rope_type": "yarn"}}, CheckpointError, "YaRN without 'factor'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, CheckpointError, "original_max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "mscale": 1}}, UnsupportedModel, "mscale"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "x": {"rope_theta": 2}}}, CheckpointError, "diff"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, UnsupportedModel, "linear"),
    ],
)
def test_rope_theta_missing_conflicting_or_scaled(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    """Guards against any default theta, and against scaled rotary run as plain rotary."""
    with pytest.raises(error, match=words):
        parse(**changes)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("dspine_config", {"r": 1}, "DSpine"),
        ("markov_rank", 256, "DSpark"),
        ("projector_type", "domino", "Domino"),
        ("projector_type", "other", "no known kind"),
        ("attention_value_scale", 0.5, "values"),
        ("log_snr_conditioning", True, "noise"),
        ("hidden_act", "gelu", "silu"),
        ("draft_vocab_size", 50, "draft_vocab_size"),
        ("layer_types", ["full_attention", "linear_attention"], "other kinds of draft layers"),
    ],
)
def test_other_kinds_of_drafts_are_refused_at_both_levels(key: str, value: Any, words: str) -> None:
    """Guards against running weights of another kind, which load cleanly and mean something else."""
    for config in (raw() | {key: value}, raw(dflash_config=nested(**{key: value}))):
        if key in ("hidden_act", "layer_types") and key in config:
            config = {k: v for k, v in config.items() if k != key or v == value}
        if key == "dspine_config" and key not in config:
            continue
        with pytest.raises(UnsupportedModel, match=words):
            parse_draft_config(config, source="config.json")


@pytest.mark.parametrize("name", [["Qwen3DSparkModel"], ["LlamaForCausalLM"], []])
def test_other_architectures_are_refused(name: list[str]) -> None:
    """Guards against another class's weights taken for v1 because its config looks alike."""
    with pytest.raises(UnsupportedModel, match="DFlashDraftModel"):
        parse(architectures=name)


def test_switches_that_are_off_change_nothing() -> None:
    """Guards against refusing drafts that merely spell out the defaults."""
    off: dict[str, Any] = {
        "is_causal": False,
        "input_embedding_scale": 1.0,
        "output_multiplier": 1,
        "final_logit_softcapping": 0.0,
        "sample_from_anchor": False,
        "logits_start": 1,
        "markov_rank": 0,
        "target_hidden_size": 32,
        "draft_vocab_size": 97,
        "partial_rotary_factor": 0.25,  # copied from the target; tensor widths decide
    }
    assert parse(**off) == EXPECTED
    assert parse(dflash_config=nested(**off)) == EXPECTED


@pytest.mark.parametrize("vocabulary_file", [None, "draft_vocabulary.json"])
@pytest.mark.parametrize("num_target_layers", [None, 36])
def test_json_round_trip(vocabulary_file: str | None, num_target_layers: int | None) -> None:
    """Guards against a field that is exported but not read, or the reverse."""
    config = DraftConfig(
        **{**vars(EXPECTED), "draft_vocabulary_file": vocabulary_file, "num_target_layers": num_target_layers}
    )
    text = json.dumps(config.to_json())
    assert parse_draft_config(json.loads(text), source="x") == config


def test_fc_width() -> None:
    """Guards against a fusion layer of another width than the concatenated taps."""
    assert parse().fc_in_features == 3 * 32


@pytest.mark.parametrize(
    ("content", "words"), [(None, "has no config.json"), (b"{", "JSON"), (b"[1]", "object"), (b"\xff\xfe", "JSON")]
)
def test_unreadable_files(tmp_path: Path, content: bytes | None, words: str) -> None:
    """Guards against a traceback for a folder that is no draft or a file that was cut off."""
    if content is not None:
        (tmp_path / CONFIG_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read_draft_config(tmp_path)


def test_reading_from_a_folder_names_the_file(tmp_path: Path) -> None:
    """Guards against an error that does not say which of two drafts is meant."""
    (tmp_path / CONFIG_FILE).write_text(json.dumps(raw()))
    assert read_draft_config(tmp_path) == EXPECTED
    (tmp_path / CONFIG_FILE).write_text(json.dumps(raw(target_layer_ids=None)))
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read_draft_config(tmp_path)


def vocabulary(folder: Path, content: str | None, name: str = "ids.json") -> tuple[int, ...] | None:
    if content is not None:
        (folder / name).write_text(content)
    return read_draft_vocabulary(folder, parse(draft_vocabulary_file=name))


def test_draft_vocabulary(tmp_path: Path) -> None:
    """Guards against a reduced head whose rows stand for other ids."""
    assert read_draft_vocabulary(tmp_path, parse()) is None
    assert vocabulary(tmp_path, "[0, 5, 96]") == (0, 5, 96)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "cannot read|does not exist|no such"),
        ("", "cannot read"),
        ("{}", "a list of token ids, not a dict"),
        ("5", "not a int"),
        ("[]", "is empty"),
        ("[5, 4]", "entry 1 is 4, below"),
        ("[4, 4]", "entry 1 is 4, which stands in the list already"),
        ("[4, 5, 4]", "entry 2 is 4, which stands in the list already"),
        ("[0, 97]", "entry 1 is 97, outside the vocabulary .ids 0 to 96"),
        ("[-1, 2]", "entry 0 is -1, outside"),
        ("[1.0]", "entry 0 is '1.0', which is no whole number"),
        ("[true, 3]", "entry 0 is 'True'"),
        ('["a"]', "entry 0 is 'a'"),
        ("[90]", "90, the mask id, is the only entry"),
        (str([0] * 1000), "larger than a list of 97 ids"),
    ],
)
def test_bad_draft_vocabularies(tmp_path: Path, content: str | None, part: str) -> None:
    """Guards against ids outside the head, in another order (argmax would map to wrong tokens), or the mask alone; and
    against one sentence for all of these, which sends the user to read thousands of numbers."""
    with pytest.raises(CheckpointError, match=r"ids\.json") as caught:
        vocabulary(tmp_path, content)
    assert re.search(part, str(caught.value), re.IGNORECASE), caught.value
    assert "export the draft again" in str(caught.value) or content is None


@pytest.mark.parametrize("name", ["../ids.json", "/tmp/ids.json", 5])
def test_draft_vocabulary_stays_inside_the_folder(name: Any) -> None:
    """Guards against a checkpoint that has other files of the machine read."""
    with pytest.raises(CheckpointError, match="plain file name"):
        parse(draft_vocabulary_file=name)
