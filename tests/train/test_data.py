"""Training sequences: the split, its leaks, the order of epochs."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash.errors import DataError
from dflash.train.data import Dataset, epoch_order, load_dataset, visits
from tests.prepare.tiny_target import write_rows


def row(number: int, id: str | None = None, **changes: Any) -> dict[str, Any]:
    """An answer that can be told by its first token."""
    values = {"prompt_ids": [number, 1, 2], "answer_ids": [5, 6, 7, 8]} | ({} if id is None else {"id": id})
    return values | changes


def load(*paths: Path, held_out: int = 2, **options: Any) -> Dataset:
    values: dict[str, Any] = {"max_length": 100, "limit": None, "seed": 0}
    return load_dataset(list(paths), held_out=held_out, **(values | options))


def firsts(sequences: list[Any]) -> list[int]:
    return [int(s.token_ids[0]) for s in sequences]


def test_a_sequence_is_prompt_then_answer(tmp_path: Path) -> None:
    """Guards against learning from prompt tokens, or from answer tokens that are masked out."""
    path = write_rows(tmp_path / "a.jsonl", [row(i, loss_mask=[1, 1, 0, 1]) for i in range(3)])
    sequence = load(path).train[0]
    assert sequence.token_ids.tolist()[1:] == [1, 2, 5, 6, 7, 8]
    assert sequence.num_prompt == 3
    assert sequence.loss_mask.tolist() == [False] * 3 + [True, True, False, True]


def test_split_is_disjoint_complete_and_repeatable(tmp_path: Path) -> None:
    """Guards against learning from what is evaluated, and a split that a resumed run would draw otherwise."""
    path = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(20)])
    data = load(path, held_out=5)
    assert len(data.held_out) == 5
    assert sorted(firsts(data.train) + firsts(data.held_out)) == list(range(20))
    again, other = load(path, held_out=5), load(path, held_out=5, seed=1)
    assert firsts(again.train) == firsts(data.train)
    assert again.fingerprint() == data.fingerprint() != other.fingerprint()
    assert set(firsts(other.held_out)) != set(firsts(data.held_out))


def test_limit_keeps_the_held_out_ones(tmp_path: Path) -> None:
    """Guards against runs of different size that are not comparable, because they hold out other sequences."""
    path = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(20)])
    short, whole = load(path, limit=4), load(path)
    assert firsts(short.held_out) == firsts(whole.held_out)
    assert firsts(short.train) == firsts(whole.train)[:4]


def held_out_prompts(*paths: Path, **options: Any) -> set[int]:
    return set(firsts(load(*paths, **options).held_out))


def test_the_split_knows_prompts_only(tmp_path: Path) -> None:
    """Guards against a leak from one stage of training to the next, which starts from the draft of the first: with
    other answers, files, orders or limits, nothing that the one learns is held out by the other."""
    first = write_rows(tmp_path / "first.jsonl", [row(i) for i in range(400)])
    shuffled = [row(i, f"x{i}", answer_ids=[9, 8, 7]) for i in (*range(900, 200, -1),)]
    second = write_rows(tmp_path / "second.jsonl", shuffled)
    for held_out in (3, 9):
        one = load(first, held_out=held_out)
        for other in (
            load(second, held_out=held_out),
            load(first, second, held_out=held_out),
            load(second, held_out=held_out, limit=20),
        ):
            assert not set(firsts(one.train)) & set(firsts(other.held_out))
            assert not set(firsts(other.train)) & set(firsts(one.held_out))
    same = write_rows(tmp_path / "same.jsonl", [row(i, answer_ids=[9, 8, 7]) for i in reversed(range(400))])
    assert held_out_prompts(first, held_out=9) == held_out_prompts(same, held_out=9)
    assert held_out_prompts(first, held_out=9) != held_out_prompts(first, held_out=9, seed=1)


def test_reserved_prompts_are_never_learnt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a share that is not kept: about one prompt in 32 of a large set, whatever is evaluated; where a
    set has fewer of them than are to be held out, that is said."""
    caplog.set_level("INFO")
    path = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(3200)])
    data = load(path, held_out=5)
    assert 60 < 3200 - len(data.train) < 140
    assert len(data.held_out) == 5
    assert not caplog.text
    few = load(path, held_out=500)
    assert set(firsts(data.held_out)) < set(firsts(few.held_out))
    assert len(few.train) == 2700
    assert "500 held-out sequences lie outside" in caplog.text


def test_equal_prompts_are_on_one_side(tmp_path: Path) -> None:
    """Guards against several answers to one prompt, of which one is learnt and one evaluated."""
    path = write_rows(tmp_path / "a.jsonl", [row(i, answer_ids=[5, 6, n]) for i in range(10) for n in range(3)])
    data = load(path, held_out=4)
    assert not set(firsts(data.train)) & set(firsts(data.held_out))
    assert len(data.held_out) == 6


@pytest.mark.parametrize("seed", range(8))
def test_turns_of_one_conversation_stay_on_one_side(tmp_path: Path, seed: int) -> None:
    """Guards against a leak: the third turn's prompt contains the first two answers word by word."""
    names = [f"c{c}" + (f"#turn{t}" if t > 1 else "") for c in range(6) for t in (1, 2, 3)]
    path = write_rows(tmp_path / "a.jsonl", [row(i, name) for i, name in enumerate(names)])
    data = load(path, held_out=2, seed=seed)
    sides = [{i // 3 for i in firsts(part)} for part in (data.train, data.held_out)]
    assert not sides[0] & sides[1]
    assert 2 <= len(data.held_out) <= 6
    assert len(data.held_out) % 3 == 0
    assert len(data.train) + len(data.held_out) == 18


def test_equal_ids_of_other_files_are_other_conversations(tmp_path: Path) -> None:
    """Guards against files without ids, whose rows are all called line-N, being taken for conversations."""
    folder = tmp_path / "set"
    folder.mkdir()
    for name in range(4):
        write_rows(folder / f"{name}.jsonl", [row(10 * name + i) for i in range(5)])
    assert len(load(folder, held_out=3).held_out) == 3
    turns = [row(90, "line-1"), row(91, "line-1#turn2"), row(92, "x#turned")]
    data = load(folder, write_rows(tmp_path / "turns.jsonl", turns), held_out=12)
    assert len(data.held_out) in (12, 13)


def test_cut_sequences(tmp_path: Path) -> None:
    """Guards against sequences without anything to learn after the cut to max_length."""
    rows = [row(i, answer_ids=list(range(5, 5 + n))) for i, n in enumerate([1, 2, 3, 9, 9])]
    rows.append(row(9, loss_mask=[1, 0, 1, 0]))
    path = write_rows(tmp_path / "a.jsonl", rows)
    data = load(path, held_out=1, max_length=6)
    assert sorted(firsts(data.train + data.held_out)) == [1, 2, 3, 4]
    assert max(len(s.token_ids) for s in data.train + data.held_out) == 6
    with pytest.raises(DataError, match="only 0 usable answers"):
        load(path, max_length=4)


@pytest.mark.parametrize("held_out", [3, 4])
def test_too_few_answers(tmp_path: Path, held_out: int) -> None:
    """Guards against an endless loop over nothing."""
    path = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(3)])
    with pytest.raises(DataError, match=r"prepare more answers or lower data\.held_out"):
        load(path, held_out=held_out)
    with pytest.raises(DataError, match="all turns"):
        load(write_rows(tmp_path / "b.jsonl", [row(1, "a"), row(2, "a#turn2")]), held_out=1)


def test_answers_of_another_target(tmp_path: Path) -> None:
    """Guards against an index error deep in the embedding."""
    path = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(8)])
    with pytest.raises(DataError, match="another target"):
        load(path, vocab_size=8)


def test_fingerprint_sees_every_change(tmp_path: Path) -> None:
    """Guards against resuming on other data: another token, mask, prompt length or number of sequences."""
    rows = [row(i) for i in range(5)]
    changes: list[dict[str, Any]] = [
        {},
        {"answer_ids": [5, 6, 7, 9]},
        {"loss_mask": [1, 1, 1, 0]},
        {"prompt_ids": [0, 1], "answer_ids": [2, 5, 6, 7, 8]},
    ]
    sets = [[rows[0] | change, *rows[1:]] for change in changes] + [rows[:4]]
    found = {load(write_rows(tmp_path / f"{n}.jsonl", part)).fingerprint() for n, part in enumerate(sets)}
    assert len(found) == 5


def test_an_epoch_visits_everything_once() -> None:
    """Guards against sequences that are never seen, and epochs in the same order."""
    seen = [number for number, _ in itertools.islice(visits(7, seed=3, start=0), 21)]
    assert Counter(seen) == dict.fromkeys(range(7), 3)
    assert seen[:7] != seen[7:14] != seen[14:]
    assert epoch_order(7, seed=3, epoch=1).tolist() == seen[7:14]


@pytest.mark.parametrize("start", [0, 1, 6, 7, 8, 20])
def test_visits_go_on_anywhere(start: int) -> None:
    """Guards against a resumed run that sees other sequences or draws other anchors than one that was not stopped."""
    whole = [(n, rng.random()) for n, rng in itertools.islice(visits(7, seed=3, start=0), 30)]
    later = [(n, rng.random()) for n, rng in itertools.islice(visits(7, seed=3, start=start), 30 - start)]
    assert later == whole[start:]
    assert len({draw for _, draw in whole}) == 30, "anchors are drawn anew at every visit"
    assert whole != [(n, rng.random()) for n, rng in itertools.islice(visits(7, seed=4, start=0), 30)]


def test_ids_are_plain_integers(tmp_path: Path) -> None:
    """Guards against 32-bit ids that torch refuses as indices."""
    path = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(3)])
    assert load(path).train[0].token_ids.dtype == np.int64
