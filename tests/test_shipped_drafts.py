"""What ships is usable: guards against a draft that was exported with other code, grew too large, lost its card or
names taps and a vocabulary that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dflash
from dflash.backends.torch.draft_loading import load_draft
from dflash.core.draft_config import WEIGHTS_FILE
from dflash.registry import DRAFTS, TARGETS

FOLDERS = {name: Path(dflash.__file__).parent / draft.folder for name, draft in DRAFTS.items()}
MOST_BYTES = 40_000_000


@pytest.mark.parametrize("name", FOLDERS)
def test_draft_loads_strictly(name: str) -> None:
    load_draft(FOLDERS[name], torch.device("cpu"), torch.float32)
    assert (FOLDERS[name] / WEIGHTS_FILE).stat().st_size <= MOST_BYTES


@pytest.mark.parametrize("name", FOLDERS)
def test_draft_has_a_card(name: str) -> None:
    card = (FOLDERS[name] / "README.md").read_text(encoding="utf-8")
    for heading in ("Data", "Recipe", "Acceptance", "Licence"):
        assert f"## {heading}" in card, heading


@pytest.mark.parametrize("name", DRAFTS)
def test_draft_serves_a_target_that_exists(name: str) -> None:
    assert set(DRAFTS[name].targets) & set(TARGETS)
