"""From the user's words to what an engine is given: hub ids untouched, everything else a folder with safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash.core.published import PUBLISHED, PublishedDraft
from dflash.errors import CheckpointError, ModelError
from dflash.launch.drafts import SLIDING, draft_by_config
from dflash.launch.locate import pair_problems, served_draft, served_target
from dflash.launch.plan import ServedTarget
from dflash.launch.published import LAYERS
from dflash.registry import DRAFTS
from dflash.resolve import AUTO, Progress, Source
from tests.backends.tiny_pair import edit_config, save_draft, save_target
from tests.core.dialect_cases import CASES

V1: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 64,
    "vocab_size": 100,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 9]},
    "layer_types": ["full_attention", "full_attention"],
}


def facts(**changes: Any) -> Any:
    return draft_by_config({**V1, **changes}, "draft")


def never(repo: str, revision: str | None) -> Mapping[str, Any]:
    raise AssertionError(f"asked the network for {repo}")


def test_hub_ids_stay_hub_ids() -> None:
    """Guards against downloading a 60 GB target on the machine that only prints a command."""
    target = served_target("Qwen/Qwen3-8B@v1")
    assert (target.location, target.name, target.revision) == ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "v1")
    assert not target.is_local


@pytest.mark.parametrize("entry", [one for one in PUBLISHED if one.block_size], ids=lambda entry: entry.draft)
def test_published_drafts_need_no_network(entry: PublishedDraft) -> None:
    """Guards against a --dry-run that fails without a network."""
    target = served_target(entry.target)
    assert entry.block_size is not None
    draft = served_draft(f"{entry.draft}@abc", target, fetch=never)
    assert (draft.location, draft.revision) == (entry.draft, "abc")
    assert draft.num_proposals == entry.block_size - (0 if entry.anchor_predicts else 1)
    first = served_draft(AUTO, target, fetch=never)
    assert (first.location, first.revision) == (next(o.draft for o in PUBLISHED if o.target == entry.target), None)


def test_layers_are_those_of_published_drafts() -> None:
    """Guards against a table that names drafts nobody publishes any more."""
    assert set(LAYERS) <= {entry.draft for entry in PUBLISHED}


def test_published_drafts_of_unknown_block_are_read() -> None:
    """Guards against the engine's silent default for a draft whose entry states no block."""
    (entry,) = [one for one in PUBLISHED if one.draft == "z-lab/Qwen3.5-122B-A10B-DFlash"]
    assert entry.block_size is None
    draft = served_draft(AUTO, served_target(entry.target), fetch=lambda repo, revision: V1)
    assert (draft.location, draft.block_size) == (entry.draft, 16)


def test_other_hub_drafts_are_asked_for_their_config() -> None:
    """Guards against guessing the block of a draft nobody listed."""
    asked: list[tuple[str, str | None]] = []

    def fetch(repo: str, revision: str | None) -> Mapping[str, Any]:
        asked.append((repo, revision))
        return V1

    draft = served_draft("me/my-draft@v2", served_target("me/my-target"), fetch=fetch)
    assert asked == [("me/my-draft", "v2")]
    assert (draft.location, draft.revision, draft.num_proposals) == ("me/my-draft", "v2", 15)


def test_no_draft_is_known() -> None:
    """Guards against serving without a draft, silently, because there was none to be found."""
    with pytest.raises(ModelError, match="no draft is shipped"):
        served_draft(AUTO, served_target("me/my-target"))


def test_folders(tmp_path: Path) -> None:
    """Guards against relative paths, which mean another place where the engine runs."""
    target = served_target(str(save_target(tmp_path / "my-target")))
    draft = served_draft(str(save_draft(tmp_path / "draft")), target)
    assert (target.name, target.location) == ("my-target", str(tmp_path / "my-target"))
    assert draft.location == str(tmp_path / "draft")
    assert target.architecture == "LlamaForCausalLM"
    assert pair_problems(draft, target) == []
    edit_config(tmp_path / "draft", num_target_layers=77)
    (problem,) = pair_problems(served_draft(str(tmp_path / "draft"), target), target)
    assert "number of target layers 77" in problem


def test_gguf_targets_are_handed_over_as_their_converted_copy(tmp_path: Path) -> None:
    """Guards against an engine that is given a GGUF file, or its converted copy under an unreadable name."""
    folder = save_target(tmp_path / "cache" / "0123456789abcdef")
    gguf = tmp_path / "Tiny.Q4.gguf"
    gguf.write_bytes(b"GGUF")

    def convert(source: Source, progress: Progress | None) -> Path:
        assert source.path == gguf
        return folder

    target = served_target(str(gguf), convert=convert)
    assert (target.location, target.name) == (str(folder), "Tiny.Q4")


def test_shipped_drafts_are_readable_by_engines() -> None:
    """Guards against shipping a draft that no engine can be told about."""
    for name, entry in DRAFTS.items():
        target = ServedTarget(location="/x", name=entry.targets[0])
        draft = served_draft(name, target)
        assert draft.kind == "dflash"
        assert draft.num_proposals >= 1
        assert served_draft(AUTO, target) == draft


@pytest.mark.parametrize(
    ("changes", "kind", "proposals"),
    [
        ({}, "dflash", 15),
        ({"dflash_config": {"projector_type": "domino"}, "shift_label": False}, "domino", 15),
        ({"dspine_config": {"rank": 1}}, "dspine", 15),
        ({"speculators_model_type": "eagle3"}, "speculators-eagle3", 15),
    ],
)
def test_kinds(changes: dict[str, Any], kind: str, proposals: int) -> None:
    """Guards against a head that is served by the wrong method, which answers right and slowly."""
    draft = facts(**changes)
    assert (draft.kind, draft.num_proposals) == (kind, proposals)


TOLD_BY_TENSORS = ("modelopt",)
"""Their configs look like SpecForge's; a folder is read with its tensors, so that only hub ids are affected."""


@pytest.mark.parametrize("case", [case for case, (dialect, *_) in CASES.items() if dialect not in TOLD_BY_TENSORS])
def test_every_layout_by_its_config_alone(case: str) -> None:
    """Guards against a layout that is read one way for decoding here and another way for an engine's flags."""
    dialect, raw, _, config = CASES[case]
    draft = draft_by_config(raw, "draft")
    assert draft.num_proposals == config.max_proposal
    assert draft.kind.startswith("speculators-") == dialect.startswith("speculators")
    assert draft.kind.endswith("dspark" if config.anchor_predicts else config.kind)


def test_windows() -> None:
    """Guards against calling a draft mixed because it states its layers."""
    assert not facts().has_mixed_windows
    assert not facts(layer_types=[SLIDING, SLIDING]).has_mixed_windows
    assert facts(layer_types=[SLIDING, SLIDING]).all_sliding
    assert facts(layer_types=[SLIDING, "full_attention"]).has_mixed_windows
    assert not facts(layer_types=None).all_sliding
    assert facts(is_causal=True).is_causal
    assert not facts(is_causal=False, layer_types=[SLIDING, SLIDING]).is_causal


@pytest.mark.parametrize("value", [None, 1, 0, -3, True, "16"])
def test_block_size_is_never_guessed(value: object) -> None:
    """Guards against an engine's silent default of 16."""
    with pytest.raises(CheckpointError, match="block_size"):
        facts(block_size=value)


def test_unreadable_config(tmp_path: Path) -> None:
    """Guards against a traceback of the JSON parser."""
    draft = save_draft(tmp_path / "draft")
    for text in ("{", json.dumps([])):
        (draft / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError):
            served_draft(str(draft), ServedTarget(location="/x", name="x"))


def test_a_draft_that_only_an_engine_runs(tmp_path: Path) -> None:
    """Guards against refusing to serve what this package cannot decode with: SGLang runs Domino heads."""
    draft = save_draft(tmp_path / "draft")
    edit_config(draft, projector_type="domino")
    found = served_draft(str(draft), ServedTarget(location="/x", name="x"))
    assert (found.kind, found.num_proposals) == ("domino", 7)
