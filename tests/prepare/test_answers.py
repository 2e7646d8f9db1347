"""Answers files: what is written is read back, and every fault is named with file and line."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from dflash.errors import DataError
from dflash.prepare.answers import (
    MANIFEST_NAME,
    RUN_NAME,
    AnswerRow,
    Manifest,
    answer_files,
    read_answers,
    read_manifest,
    write_manifest,
    write_shard,
)
from dflash.prepare.jsonl import write_atomically
from tests.prepare.tiny_target import write_rows


def _row(name: str, prompt: list[int], answer: list[int], mask: list[int] | None = None) -> AnswerRow:
    return AnswerRow(
        id=name,
        source="set",
        prompt_ids=array("i", prompt),
        answer_ids=array("i", answer),
        loss_mask=None if mask is None else array("i", mask),
    )


ROWS = [_row("a/ü", [1, 2], [3, 4, 0]), _row("b", [5], [6, 7], [0, 1]), _row("c", [1], [0])]


def _closed_set(folder: Path) -> Path:
    folder.mkdir()
    shards = (
        write_shard(folder / "answers-00000.jsonl", ROWS[:2]),
        write_shard(folder / "answers-00001.jsonl", ROWS[2:]),
    )
    write_manifest(folder, Manifest(run={"target": "tiny"}, num_skipped=4, shards=shards))
    return folder


def test_rows_survive_a_round_trip(tmp_path: Path) -> None:
    """Guards against a writer and a reader that disagree (mask lost, order changed, text escaped twice)."""
    folder = _closed_set(tmp_path / "set")
    assert list(read_answers(folder)) == ROWS
    assert list(read_answers(folder / "answers-00001.jsonl", vocab_size=2)) == ROWS[2:]
    manifest = read_manifest(folder)
    assert manifest is not None
    assert (manifest.run, manifest.num_skipped) == ({"target": "tiny"}, 4)
    totals = [manifest.total(field) for field in ("num_rows", "num_empty", "num_prompt_tokens", "num_answer_tokens")]
    assert totals == [3, 2, 4, 6]  # "b" has one learnable token, "c" only its end token: no anchor with a label


def test_rows_of_other_makers_are_read_as_they_are(tmp_path: Path) -> None:
    """Guards against requiring more than prompt and answer ids: id and source may be absent, keys may be added."""
    path = write_rows(tmp_path / "plain.jsonl", [{"prompt_ids": [1], "answer_ids": [2, 3], "extra": None}])
    assert list(read_answers(path)) == [
        AnswerRow(id="line-1", source="", prompt_ids=array("i", [1]), answer_ids=array("i", [2, 3]))
    ]
    write_rows(tmp_path / "another.jsonl", [{"id": 5, "prompt_ids": [1], "answer_ids": [2], "loss_mask": None}])
    assert [row.id for row in read_answers(tmp_path)] == ["5", "line-1"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "not JSON"),
        ("3", "holds a JSON int"),
        ({"answer_ids": [1]}, "'prompt_ids' is missing"),
        ({"prompt_ids": [1]}, "'answer_ids' is missing"),
        ({"prompt_ids": [1], "answer_ids": []}, "'answer_ids' is empty"),
        ({"prompt_ids": [], "answer_ids": [1]}, "'prompt_ids' is empty"),
        ({"prompt_ids": [1], "answer_ids": [2, -1]}, "negative id -1"),
        ({"prompt_ids": [1], "answer_ids": [2, 1.5]}, "must be a list of integers"),
        ({"prompt_ids": [1], "answer_ids": [2**31]}, "must be a list of integers"),
        ({"prompt_ids": [1], "answer_ids": ["2"]}, "must be a list of integers"),
        ({"prompt_ids": "12", "answer_ids": [2]}, "must be a list of integers"),
        ({"prompt_ids": [1], "answer_ids": [2, 3], "loss_mask": [1]}, "1 flags for 2 answer tokens"),
        ({"prompt_ids": [1], "answer_ids": [2, 3], "loss_mask": [1, 2]}, "may hold 0 and 1 only"),
    ],
)
def test_bad_row_is_named(tmp_path: Path, bad: object, says: str) -> None:
    """Guards against a shifted or foreign row that trains in silence, or a traceback without a line."""
    path = write_rows(tmp_path / "a.jsonl", [{"prompt_ids": [1], "answer_ids": [2]}, bad])
    with pytest.raises(DataError) as caught:
        list(read_answers(path))
    assert f"{path}:2: " in str(caught.value)
    assert says in str(caught.value)


def test_answers_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    """Guards against an index error deep in the embedding, hours after the command was given."""
    path = write_rows(tmp_path / "a.jsonl", [{"prompt_ids": [9], "answer_ids": [10]}])
    assert len(list(read_answers(path, vocab_size=11))) == 1
    with pytest.raises(DataError, match=r"a\.jsonl:1: token id 10 lies outside the target's vocabulary of 10"):
        list(read_answers(path, vocab_size=10))


def test_unfinished_run_is_refused_unless_asked_for(tmp_path: Path) -> None:
    """Guards against training on half a set without knowing it."""
    folder = _closed_set(tmp_path / "set")
    (folder / MANIFEST_NAME).unlink()
    (folder / RUN_NAME).write_text("{}")
    with pytest.raises(DataError, match=r"has not finished.*same `dflash prepare` command again"):
        answer_files(folder)
    assert list(read_answers(folder, allow_partial=True)) == ROWS


def test_shards_that_differ_from_their_manifest_are_refused(tmp_path: Path) -> None:
    """Guards against a set that lost or changed rows after it was closed."""
    folder = _closed_set(tmp_path / "set")
    shard = folder / "answers-00000.jsonl"
    shard.write_text(shard.read_text().splitlines(keepends=True)[0])
    with pytest.raises(DataError, match=r"answers-00000\.jsonl: differs from its manifest.*makes only what is missing"):
        list(read_answers(folder))
    shard.unlink()
    with pytest.raises(DataError, match="is missing"):
        list(read_answers(folder))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds a JSON list"),
        ('{"format": "other"}', "format 'other'"),
        ('{"format": "dflash-answers-1"}', "damaged"),
        ('{"format": "dflash-answers-1", "run": {}, "num_skipped": 0, "shards": [{"name": "x"}]}', "damaged"),
    ],
)
def test_damaged_manifest_is_refused(tmp_path: Path, text: str, says: str) -> None:
    """Guards against a KeyError in place of a cure."""
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(DataError, match=says):
        answer_files(tmp_path)


def test_nothing_there_names_the_command(tmp_path: Path) -> None:
    """Guards against an empty training set that looks like a finished one."""
    with pytest.raises(DataError, match=r"no such file or folder.*dflash prepare"):
        answer_files(tmp_path / "absent")
    with pytest.raises(DataError, match="holds no answers"):
        answer_files(tmp_path)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    """Guards against a half file under the final name, and against temporary files that pile up."""
    (tmp_path / "taken").mkdir()
    with pytest.raises(DataError, match="taken: cannot be written"):
        write_atomically(tmp_path / "taken", b"x")  # renaming onto a folder fails after the bytes are written
    with pytest.raises(DataError, match="cannot be written"):
        write_atomically(tmp_path / "absent" / "file", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
