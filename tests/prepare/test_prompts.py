"""Prompt files: the three forms, and an error that names the line for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.errors import ConfigError, DataError
from dflash.prepare.prompts import read_prompts
from tests.prepare.tiny_target import write_rows


def test_three_forms_become_conversations(tmp_path: Path) -> None:
    """Guards against a form that silently loses its context or its later turns."""
    rows = [
        {"id": "a", "source": "s", "prompt": "one"},
        "",
        {"turns": ["first", "second"], "category": "kept out"},
        {"id": 7, "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},
                               {"role": "assistant", "content": "old"}, {"role": "user", "content": "again"},
                               {"role": "assistant", "content": "dropped"}]},
    ]  # fmt: skip
    plain, turns, messages = read_prompts(write_rows(tmp_path / "p.jsonl", rows))
    assert (plain.id, plain.source, plain.turns) == ("a", "s", ("one",))
    assert plain.opening("sys") == [{"role": "system", "content": "sys"}, {"role": "user", "content": "one"}]
    assert (turns.id, turns.source, turns.turns) == ("line-3", "", ("first", "second"))
    assert [turns.turn_id(0), turns.turn_id(1)] == ["line-3", "line-3#turn2"]
    assert messages.id == "7"
    contents = [message["content"] for message in messages.opening("not used: the row has its own")]
    assert contents == ["be brief", "hi", "old", "again"]


def test_limit_takes_the_first_rows_and_reads_no_further(tmp_path: Path) -> None:
    """Guards against a limit that counts blank lines or fails on a bad line beyond it."""
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "a"}, "", {"prompt": "b"}, "{bad"])
    assert [row.turns for row in read_prompts(path, limit=2)] == [("a",), ("b",)]
    with pytest.raises(ConfigError, match="limit must be at least 1"):
        read_prompts(path, limit=0)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"prompt": "a"', "not JSON"),
        ('["prompt"]', "holds a JSON list"),
        ({"text": "a"}, "found only 'text'"),
        ({"prompt": "a", "turns": ["b"]}, "found prompt and turns"),
        ({"prompt": "  "}, "'prompt' must be text that is not blank"),
        ({"prompt": ["a"]}, "'prompt' must be text"),
        ('{"prompt": "\\ud800"}', "not valid Unicode"),
        ({"turns": []}, "'turns' must be a list"),
        ({"turns": ["a", 3]}, "turn 2 must be text"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "must end with a user message"),
        ({"messages": [{"content": "a"}]}, "message 1 must be an object"),
        ({"messages": "a"}, "'messages' must be a list"),
        ({"id": 1.5, "prompt": "a"}, "'id' must be text or an integer"),
        ({"id": "first", "prompt": "a"}, "id 'first' was used on line 1"),
        ({"id": "two#turn2", "prompt": "a"}, "was used on line 2"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, bad: object, says: str) -> None:
    """Guards against an error that leaves the user to search a file of 60 000 lines."""
    rows = [{"id": "first", "prompt": "fine"}, {"id": "two", "turns": ["x", "y"]}, bad]
    path = write_rows(tmp_path / "p.jsonl", rows)
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    assert f"{path}:3: " in str(caught.value)
    assert says in str(caught.value)
    assert "Mend or delete this line" in str(caught.value)


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    """Guards against UnicodeDecodeError reaching the user (it is a ValueError, not a JSONDecodeError)."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"p\.jsonl:2: not JSON"):
        read_prompts(path)


def test_missing_and_empty_files_name_the_cure(tmp_path: Path) -> None:
    """Guards against a run over nothing that ends in success."""
    with pytest.raises(DataError, match=r"no such file.*JSON lines"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match=r"directory.*JSON lines"):
        read_prompts(tmp_path)
    with pytest.raises(DataError, match="holds no prompts"):
        read_prompts(write_rows(tmp_path / "p.jsonl", ["", " "]))
