"""The recipes of the repository are recipes: guards against a renamed key that leaves a shipped recipe behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.train.config import load_config

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid(path: Path) -> None:
    config = load_config(path)
    assert config.out == Path("runs") / path.stem  # two recipes must not share a run folder
