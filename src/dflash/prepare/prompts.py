"""Prompt files: what a target is asked, before any template or tokenizer.

One JSON object per line, in one of three forms (`id` and `source` are optional in each):

    {"prompt": "text"}                        one user turn
    {"turns": ["first", "second"]}            user turns answered one after the other (the evaluation sets)
    {"messages": [{"role": ..., "content": ...}, ...]}   a conversation; answers at its end are left out,
                                              because a draft learns from what its own target says

Used by `prepare` and by the trainer's evaluation on held-out prompts. No torch, no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dflash.errors import ConfigError, DataError
from dflash.prepare.jsonl import line_error, read_json_lines

Message = dict[str, str]
"""One chat message: {"role": "system" | "user" | "assistant" | ..., "content": text}."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One row of a prompts file."""

    id: str
    """The row's own id, or "line-N"."""
    source: str
    """The set that the row comes from; empty when the file does not say."""
    context: tuple[Message, ...]
    """Messages before the first open user turn (system message, earlier turns)."""
    turns: tuple[str, ...]
    """User turns that the target answers in order; never empty."""

    def opening(self, system: str | None = None) -> list[Message]:
        """Messages up to and including the first open user turn; `system` leads unless the row has its own."""
        messages = [dict(message) for message in self.context]
        if system is not None and not any(message["role"] == "system" for message in messages):
            messages.insert(0, {"role": "system", "content": system})
        return [*messages, {"role": "user", "content": self.turns[0]}]

    def turn_id(self, turn: int) -> str:
        """Id of the answer to user turn `turn` (from 0): the row's id, with a suffix from the second turn on."""
        return self.id if turn == 0 else f"{self.id}#turn{turn + 1}"


def read_prompts(path: Path, *, limit: int | None = None) -> list[Conversation]:
    """Read the first `limit` rows (all if None) of a prompts file.

    Raises:
        ConfigError: limit below 1.
        DataError: unreadable file, a bad line (named), an id used twice, or no rows at all.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, not {limit}; leave it out to take every prompt.")
    conversations: list[Conversation] = []
    first_line: dict[str, int] = {}
    for number, row in islice(read_json_lines(path), limit):
        conversation = _parse(row, path, number)
        for turn in range(len(conversation.turns)):
            earlier = first_line.setdefault(conversation.turn_id(turn), number)
            if earlier != number:
                raise line_error(path, number, f"id {conversation.turn_id(turn)!r} was used on line {earlier} already")
        conversations.append(conversation)
    if not conversations:
        raise DataError(f'{path}: holds no prompts. Give JSON lines with "prompt", "turns" or "messages".')
    return conversations


def _parse(row: Mapping[str, Any], path: Path, number: int) -> Conversation:
    forms = [key for key in ("prompt", "turns", "messages") if key in row]
    if len(forms) != 1:
        found = " and ".join(forms) if forms else f"only {', '.join(map(repr, row)) or 'nothing'}"
        raise line_error(path, number, f'exactly one of "prompt", "turns", "messages" is needed, found {found}')
    try:
        context, turns = _messages(row["messages"]) if forms == ["messages"] else ((), _turns(row[forms[0]], forms[0]))
        return Conversation(
            id=_label(row, "id") or f"line-{number}", source=_label(row, "source"), context=context, turns=turns
        )
    except ValueError as error:
        raise line_error(path, number, str(error)) from error


def _label(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{key!r} must be text or an integer, not {type(value).__name__}")
    return str(value)


def _turns(value: object, key: str) -> tuple[str, ...]:
    if key == "prompt":
        return (_text(value, "'prompt'"),)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError("'turns' must be a list of at least one text")
    return tuple(_text(turn, f"turn {index}") for index, turn in enumerate(value, start=1))


def _messages(value: object) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """Split a conversation into (what comes before, the last user turn); trailing answers are dropped."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError("'messages' must be a list of {'role', 'content'} objects")
    messages: list[Message] = []
    for index, message in enumerate(value, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {index} must be an object with 'role' and 'content'")
        messages.append({"role": message["role"], "content": _text(message.get("content"), f"message {index}")})
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("'messages' must end with a user message (before any answer)")
    return tuple(messages[:-1]), (messages[-1]["content"],)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{what} must be text that is not blank")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # a lone surrogate passes JSON but no tokenizer
        raise ValueError(f"{what} is not valid Unicode ({error.reason})") from error
    return value
