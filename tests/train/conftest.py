"""A tiny target with answers of its own, made once for all tests of the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.toy import make_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` and `answers.jsonl`, which tests leave as they are."""
    return make_pair(tmp_path_factory.mktemp("pair"))
