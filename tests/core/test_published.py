"""The registry of published drafts: a target finds its draft, and what changed on the hub is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dflash.core.draft_config import DraftConfig
from dflash.core.published import PUBLISHED, published_as, published_for
from dflash.registry import DRAFTERS
from dflash.resolve import Source, resolve_draft
from tests.core.draft_folders import PLAIN, v1_tensors, write_draft


def config(**changes: object) -> DraftConfig:
    """What z-lab/Qwen3-8B-DFlash-b16 is known to say, with layers of another size."""
    values: dict[str, object] = {
        **PLAIN,
        "vocab_size": 151936,
        "block_size": 16,
        "mask_token_id": 151669,
        "target_layer_ids": (1, 9, 17, 25, 33),
        **changes,
    }
    return DraftConfig(**values)  # type: ignore[arg-type]


def test_a_target_finds_its_draft(tmp_path: Path) -> None:
    """Guards against `--target Qwen/Qwen3-8B` without a draft, with another target's, or with another size's."""
    asked: list[str] = []

    def download(repository: str, **_: object) -> str:
        asked.append(repository)
        held = {"dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 9, 17]}}
        return str(write_draft(tmp_path / "snapshot", PLAIN | held, v1_tensors()))

    for name in ("Qwen/Qwen3-8B", "qwen/qwen3-8b", "Qwen/Qwen3-8B@main"):
        source = resolve_draft("auto", Source(name=name, path=tmp_path), download=download)
        assert source.name == "z-lab/Qwen3-8B-DFlash-b16"
    assert asked == ["z-lab/Qwen3-8B-DFlash-b16"] * 3
    assert published_for("Qwen/Qwen3-8B-Base") is None
    assert published_for("Qwen/Qwen3.8-27B") == published_as("z-lab/Qwen3.8-27B-DFlash2@abc")


def test_entries_are_well_formed() -> None:
    """Guards against a typo in the table: every entry is a pair of hub ids of a kind that runs, listed once."""
    assert len({entry.draft for entry in PUBLISHED}) == len(PUBLISHED) >= 15
    for entry in PUBLISHED:
        assert entry.kind in DRAFTERS
        assert entry.draft.count("/") == entry.target.count("/") == 1
        taps = entry.target_layer_ids or (0, 1)
        assert list(taps) == sorted(set(taps))
        assert entry.anchor_predicts == entry.draft.startswith("deepseek-ai/")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"target_layer_ids": (2, 10, 18, 26, 34)}, r"taps \(2, 10, 18, 26, 34\) \(published: \(1, 9"),
        ({"block_size": 8}, "block size 8"),
        ({"mask_token_id": 5}, "mask id 5"),
        ({"anchor_predicts": True}, "anchor slot that predicts True"),
        ({"markov_rank": 4, "markov_head": "vanilla"}, "kind dspark"),
    ],
)
def test_changes_on_the_hub_are_named(change: dict[str, object], words: str | None) -> None:
    """Guards against a repository that was changed in place and now loads as another draft."""
    entry = published_as("z-lab/Qwen3-8B-DFlash-b16")
    assert entry is not None
    found = entry.differences(config(**change))
    assert bool(found) == (words is not None)
    if words is not None:
        assert len(found) == 1
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(found[0])


def test_what_is_not_known_is_not_compared() -> None:
    """Guards against warnings about values that nobody has published."""
    entry = dataclasses.replace(PUBLISHED[0], mask_token_id=None, block_size=None, target_layer_ids=None)
    assert not entry.differences(config(block_size=4, mask_token_id=3, target_layer_ids=(0,)))
