"""What a data set of the benchmark is, and where its rows come from.

A data set is one file in this folder with a constant `DATA_SET`; its name there is its name on the command line. Rows
come from a folder of JSON lines (`--data-dir`), or else from the Hugging Face hub through the package `datasets`, which
keeps them in its own cache. Both give the same questions; the prompt format is applied here, once, to either.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.errors import ConfigError, DataError, MissingExtra
from dflash.prepare.prompts import Conversation, read_prompts

BUILT_IN = "built-in"
"""Name of the set that travels with this package."""

_MODULES_THAT_ARE_NO_SETS = ("base",)


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A published set of questions."""

    title: str
    licence: str
    source: str
    """Where it was published."""
    hub_id: str
    hub_config: str | None
    hub_split: str
    file: str
    """Name of its file in a `--data-dir`: rows of {"id", "turns": [user turn, ...]}."""
    turns: Callable[[Mapping[str, Any]], Sequence[str]]
    """The user turns of one row of the hub's set, before `prompt`."""
    row_id: Callable[[Mapping[str, Any], int], str]
    """A row's own id, or one made from its index from 0."""
    prompt: Callable[[str], str] = lambda turn: turn
    """A user turn as the DFlash paper's benchmark asks it (suffixes, code fences)."""


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What is asked: a set's conversations and how to find them again."""

    name: str
    conversations: tuple[Conversation, ...]
    origin: str
    """File or hub repository that the rows came from."""
    licence: str
    num_available: int
    """Rows of the whole set; more than len(conversations) where it was cut."""

    @property
    def sha256(self) -> str:
        """Of everything that is asked, in order."""
        asked = [[one.id, list(one.context), list(one.turns)] for one in self.conversations]
        return hashlib.sha256(json.dumps(asked, ensure_ascii=False, sort_keys=True).encode()).hexdigest()


HubRows = Callable[[DataSet], Sequence[Mapping[str, Any]]]
"""Fetch the rows of a set from the hub."""


def known_sets() -> list[str]:
    """Names that `load_questions` takes besides a file, the built-in set first."""
    package = importlib.import_module("dflash.bench.datasets")
    found = {info.name for info in pkgutil.iter_modules(package.__path__)} - {*_MODULES_THAT_ARE_NO_SETS, "built_in"}
    return [BUILT_IN, *sorted(name.replace("_", "-") for name in found)]


def load_questions(
    name: str, *, data_dir: Path | None = None, limit: int | None = None, hub_rows: HubRows | None = None
) -> Questions:
    """The first `limit` conversations (all if None) of a known set or of a .jsonl file.

    Args:
        name: one of `known_sets()`, or a path to a file of prompts (forms: `prepare/prompts.py`).
        data_dir: folder to look in first; a set without a file there comes from the hub.
        hub_rows: replaces the hub client in tests.

    Raises: ConfigError (unknown name, bad limit), DataError (unreadable rows), MissingExtra (no `datasets` installed).
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, not {limit}; leave it out to take every prompt.")
    if name == BUILT_IN:
        from dflash.bench.datasets.built_in import built_in_questions

        return _cut(built_in_questions(), limit)
    if name.endswith(".jsonl"):
        rows = read_prompts(Path(name))
        return _cut(_questions(Path(name).name, rows, origin=Path(name).name, licence="not stated"), limit)
    data_set = find_set(name)
    if data_dir is not None and (data_dir / data_set.file).exists():
        rows = read_prompts(data_dir / data_set.file)
        origin = f"{data_set.file} in --data-dir"
    elif data_dir is not None and not data_dir.is_dir():
        raise DataError(f"--data-dir {data_dir} is no folder; give one with files such as {data_set.file}.")
    else:
        rows = _from_hub(data_set, hub_rows or _load_from_hub)
        origin = f"https://huggingface.co/datasets/{data_set.hub_id}"
    asked = [_as_asked(row, data_set.prompt) for row in rows]
    return _cut(_questions(name, asked, origin=origin, licence=data_set.licence), limit)


def find_set(name: str) -> DataSet:
    """The published set called `name`. Raises ConfigError naming the known ones."""
    names = known_sets()
    if name not in names or name == BUILT_IN:
        raise ConfigError(f"data set {name!r} is unknown. Known: {', '.join(names)}; a file must end in .jsonl.")
    module = importlib.import_module(f"dflash.bench.datasets.{name.replace('-', '_')}")
    data_set: DataSet = module.DATA_SET
    return data_set


def spread(conversations: Sequence[Conversation], number: int) -> tuple[Conversation, ...]:
    """`number` of them, one after the other from each source in turn, so that a short run still asks every kind."""
    by_source: dict[str, list[Conversation]] = {}
    for one in conversations:
        by_source.setdefault(one.source, []).append(one)
    columns = list(by_source.values())
    longest = max((len(column) for column in columns), default=0)
    in_turn = [column[row] for row in range(longest) for column in columns if row < len(column)]
    return tuple(in_turn[:number])


def _questions(name: str, rows: Sequence[Conversation], *, origin: str, licence: str) -> Questions:
    return Questions(name=name, conversations=tuple(rows), origin=origin, licence=licence, num_available=len(rows))


def _cut(questions: Questions, limit: int | None) -> Questions:
    if limit is None:
        return questions
    rows = questions.conversations
    chosen = spread(rows, limit) if questions.name == BUILT_IN else rows[:limit]
    return dataclasses.replace(questions, conversations=chosen)


def _as_asked(row: Conversation, prompt: Callable[[str], str]) -> Conversation:
    return Conversation(
        id=row.id, source=row.source, context=row.context, turns=tuple(prompt(turn) for turn in row.turns)
    )


def _from_hub(data_set: DataSet, hub_rows: HubRows) -> list[Conversation]:
    try:
        return [
            Conversation(id=data_set.row_id(row, index), source="", context=(), turns=tuple(data_set.turns(row)))
            for index, row in enumerate(hub_rows(data_set))
        ]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"the hub's rows of {data_set.hub_id} have no longer the columns that this version reads ({error}); "
            f"give the questions as {data_set.file} in --data-dir."
        ) from error


def _load_from_hub(data_set: DataSet) -> Sequence[Mapping[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise MissingExtra(
            f"{data_set.title} comes from the Hugging Face hub through the package `datasets`, which is not installed: "
            f"run `pip install datasets`, or give {data_set.file} in --data-dir, or leave --dataset out for the "
            "built-in prompts."
        ) from None
    try:
        rows: Sequence[Mapping[str, Any]] = list(
            load_dataset(data_set.hub_id, data_set.hub_config, split=data_set.hub_split)
        )
    except (OSError, ValueError, RuntimeError) as error:  # the hub client's network errors derive from these
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"{data_set.hub_id} could not be fetched from the hub ({reason}). Check the network, or give "
            f"{data_set.file} in --data-dir."
        ) from error
    return rows
