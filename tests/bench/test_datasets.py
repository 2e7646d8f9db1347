"""Data sets of the benchmark: the same questions from a folder and from the hub, in the published prompt format."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash.bench.datasets.base import BUILT_IN, DataSet, find_set, known_sets, load_questions
from dflash.errors import ConfigError, DataError, MissingExtra

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
HUB_ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many?", "answer": "#### 3"},
    "math500": {"problem": "Find $x$.", "unique_id": "test/algebra/1.json"},
    "humaneval": {"prompt": "def f(x):\n", "task_id": "HumanEval/0"},
    "mbpp": {"prompt": "Write a function.", "task_id": 11},
    "mt-bench": {"prompt": ["Write.", "Rewrite."], "prompt_id": 81},
}
"""One row of each set as the hub has it."""
ASKED = {
    "gsm8k": ["How many?" + BOXED],
    "math500": ["Find $x$." + BOXED],
    "humaneval": [
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f(x):\n\n```"
    ],
    "mbpp": ["Write a function."],
    "mt-bench": ["Write.", "Rewrite."],
}
IDS = {
    "gsm8k": "gsm8k/test/0",
    "math500": "test/algebra/1.json",
    "humaneval": "HumanEval/0",
    "mbpp": "mbpp/11",
    "mt-bench": "mt_bench/81",
}


def hub(data_set: DataSet) -> Sequence[Mapping[str, Any]]:
    return [row for name, row in HUB_ROWS.items() if find_set(name) is data_set]


def test_every_set_is_tested_here() -> None:
    """Guards against a new set whose format nobody checks."""
    assert known_sets() == [BUILT_IN, *sorted(HUB_ROWS)]


@pytest.mark.parametrize("name", HUB_ROWS)
def test_folder_and_hub_ask_the_same(name: str, tmp_path: Path) -> None:
    """Guards against two formats for one set, a suffix lost or doubled, and a second turn that is dropped."""
    data_set = find_set(name)
    row = {"id": IDS[name], "turns": list(data_set.turns(HUB_ROWS[name]))}
    (tmp_path / data_set.file).write_text(json.dumps(row) + "\n", encoding="utf-8")
    local = load_questions(name, data_dir=tmp_path)
    remote = load_questions(name, hub_rows=hub)
    for asked in (local, remote):
        (one,) = asked.conversations
        assert list(one.turns) == ASKED[name]
        assert one.id == IDS[name]
    assert local.sha256 == remote.sha256
    assert local.licence == data_set.licence
    assert "huggingface.co" in remote.origin
    assert data_set.file in local.origin


def test_built_in_set() -> None:
    """Guards against a package without its prompts, and against a kind that is missing from them."""
    asked = load_questions(BUILT_IN)
    kinds = Counter(one.source for one in asked.conversations)
    assert len(asked.conversations) == asked.num_available == 40
    assert len(kinds) == 8
    assert set(kinds.values()) == {5}
    assert any(len(one.turns) == 2 for one in asked.conversations)
    assert asked.licence == "Apache-2.0"


def test_a_short_run_of_the_built_in_set_asks_every_kind() -> None:
    """Guards against a default run that measures chat only."""
    asked = load_questions(BUILT_IN, limit=8)
    assert len({one.source for one in asked.conversations}) == 8
    assert asked.num_available == 40
    assert asked.sha256 != load_questions(BUILT_IN).sha256


def test_own_file_and_its_hash(tmp_path: Path) -> None:
    """Guards against a hash that does not see a changed question."""
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n', encoding="utf-8")
    asked = load_questions(str(path))
    assert [one.turns for one in asked.conversations] == [("One?",), ("Two?",)]
    path.write_text('{"prompt": "One?"}\n{"prompt": "Two!"}\n', encoding="utf-8")
    assert load_questions(str(path)).sha256 != asked.sha256
    assert load_questions(str(path), limit=1).num_available == 2


def test_errors_name_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback where a name is misspelt, a folder is missing or `datasets` is not installed."""
    with pytest.raises(ConfigError, match="gsm8k"):
        load_questions("gsm9k")
    with pytest.raises(ConfigError, match="at least 1"):
        load_questions(BUILT_IN, limit=0)
    with pytest.raises(DataError, match="is no folder"):
        load_questions("gsm8k", data_dir=tmp_path / "nowhere")
    with pytest.raises(DataError, match="columns"):
        load_questions("gsm8k", hub_rows=lambda data_set: [{"other": "x"}])
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingExtra, match="pip install datasets"):
        load_questions("gsm8k", data_dir=tmp_path)
