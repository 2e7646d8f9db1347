"""From the user's words to what an engine is given: hub ids untouched, everything else a folder with safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash.errors import CheckpointError, ModelError
from dflash.launch.drafts import SLIDING, read_served_draft
from dflash.launch.locate import pair_problems, served_draft, served_target
from dflash.launch.plan import ServedTarget
from dflash.launch.published import DRAFT_OF, FACTS
from dflash.registry import DRAFTS
from dflash.resolve import AUTO, Progress, Source
from tests.backends.tiny_pair import edit_config, save_draft, save_target

V1: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "hidden_size": 64,
    "vocab_size": 100,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 9]},
    "layer_types": ["full_attention", "full_attention"],
}


def facts(**changes: Any) -> Any:
    return read_served_draft({**V1, **changes}, "draft")


def never(repo: str, revision: str | None) -> Mapping[str, Any]:
    raise AssertionError(f"asked the network for {repo}")


def test_hub_ids_stay_hub_ids() -> None:
    """Guards against downloading a 60 GB target on the machine that only prints a command."""
    target = served_target("Qwen/Qwen3-8B@v1")
    assert (target.location, target.name, target.revision) == ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "v1")
    assert not target.is_local


@pytest.mark.parametrize("name", DRAFT_OF)
def test_published_drafts_need_no_network(name: str) -> None:
    """Guards against a --dry-run that fails without a network."""
    draft = served_draft(AUTO, served_target(name), fetch=never)
    assert draft.location == DRAFT_OF[name]
    assert served_draft(f"{draft.location}@abc", served_target(name), fetch=never).revision == "abc"
    assert FACTS[draft.location].revision is None


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
    edit_config(tmp_path / "draft", vocab_size=7)
    (problem,) = pair_problems(served_draft(str(tmp_path / "draft"), target), target)
    assert "vocabulary size 7" in problem


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
        ({"architectures": ["DFlash2DraftModel"]}, "dflash2", 15),
        ({"dflash_config": {"selector_rank": 256, "block_size": 8}, "block_size": None}, "dflash2", 7),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 64, "block_size": 7}, "dspark", 7),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "block_size": 7}, "dspark", 7),
        ({"dflash_config": {"projector_type": "domino"}}, "domino", 15),
        ({"dflash_config": {"projector_type": "dspark"}, "sample_from_anchor": False}, "dspark", 15),
        ({"dspine_config": {"rank": 1}}, "dspine", 15),
        ({"speculators_model_type": "dflash"}, "speculators-dflash", 15),
        ({"speculators_model_type": "eagle3"}, "speculators-eagle3", 15),
    ],
)
def test_kinds(changes: dict[str, Any], kind: str, proposals: int) -> None:
    """Guards against a head that is served by the wrong method, which answers right and slowly."""
    draft = facts(**changes)
    assert (draft.kind, draft.num_proposals) == (kind, proposals)


def test_windows() -> None:
    """Guards against calling a draft mixed because it states its layers."""
    assert not facts().has_mixed_windows
    assert not facts(layer_types=[SLIDING, SLIDING]).has_mixed_windows
    assert facts(layer_types=[SLIDING, SLIDING]).all_sliding
    assert facts(layer_types=[SLIDING, "full_attention"]).has_mixed_windows
    assert not facts(layer_types=None).all_sliding


@pytest.mark.parametrize("value", [None, 1, 0, -3, True, "16"])
def test_block_size_is_never_guessed(value: object) -> None:
    """Guards against an engine's silent default of 16."""
    with pytest.raises(CheckpointError, match="block_size"):
        facts(block_size=value)


def test_unreadable_config(tmp_path: Path) -> None:
    """Guards against a traceback of the JSON parser."""
    draft = save_draft(tmp_path / "draft")
    (draft / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read"):
        served_draft(str(draft), ServedTarget(location="/x", name="x"))
    (draft / "config.json").write_text(json.dumps([]), encoding="utf-8")
    with pytest.raises(CheckpointError, match="object"):
        served_draft(str(draft), ServedTarget(location="/x", name="x"))
