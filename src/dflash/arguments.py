"""Arguments of another type than is meant, refused by name where they come in, not as a TypeError deep inside.

Each function takes (name, value) and raises ConfigError that names the argument, what is meant and what was given.
NumPy's numbers are numbers; a truth value is none.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real

from dflash.errors import ConfigError

_LONGEST_SHOWN = 40


def refuse(name: str, meant: str, given: object) -> ConfigError:
    """The error of an argument that is not what is meant."""
    shown = repr(given)
    if len(shown) > _LONGEST_SHOWN or "\n" in shown:
        return ConfigError(f"{name} must be {meant}, not a {type(given).__name__}.")
    return ConfigError(f"{name} must be {meant}, not {shown}.")


def is_whole(value: object) -> bool:
    """Whether this is a whole number by its type (an item of an array of them, too): 3.0 is not."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def is_number(value: object) -> bool:
    """Whether this is a number, NaN and infinities included."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_whole(name: str, value: object, *, optional: bool = False) -> None:
    """A whole number; `optional`: or None."""
    if not (is_whole(value) or (optional and value is None)):
        raise refuse(name, f"a whole number{' or None' if optional else ''}", value)


def check_number(name: str, value: object) -> None:
    """A number."""
    if not is_number(value):
        raise refuse(name, "a number", value)


def check_flag(name: str, value: object, *, optional: bool = False) -> None:
    """True or False; `optional`: or None."""
    if not (isinstance(value, bool) or (optional and value is None)):
        raise refuse(name, f"True{', False or None' if optional else ' or False'}", value)


def check_instance(name: str, value: object, kind: type, *, optional: bool = False) -> None:
    """An object of a class of this package; `optional`: or None."""
    if not (isinstance(value, kind) or (optional and value is None)):
        raise refuse(name, f"a dflash.{kind.__name__}{' or None' if optional else ''}", value)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """One of these words."""
    if not isinstance(value, str) or value not in choices:
        raise refuse(name, f"one of {', '.join(map(repr, choices))}", value)


def check_word(name: str, value: object, *, optional: bool = False) -> None:
    """A text; `optional`: or None."""
    if not (isinstance(value, str) or (optional and value is None)):
        raise refuse(name, f"a text{' or None' if optional else ''}", value)


def check_list(name: str, value: object, of: str) -> None:
    """A list, tuple, set or array; the items are for the caller to look at. `of`: what they are, for the message."""
    if isinstance(value, str):
        raise ConfigError(f"{name} must be a list: [{value!r}], not {value!r}.")
    if isinstance(value, bytes | Mapping) or not isinstance(value, Collection):
        raise refuse(name, f"a list of {of}", value)


def check_texts(name: str, values: object) -> None:
    """A list of texts."""
    check_list(name, values, "texts")
    assert isinstance(values, Iterable)
    for value in values:
        if not isinstance(value, str):
            raise refuse(name, "a list of texts", value)


def check_token_ids(name: str, values: object, vocab_size: int | None = None) -> None:
    """A list of token ids, of a vocabulary of this size where it is known."""
    check_list(name, values, "token ids")
    assert isinstance(values, Iterable)
    for value in values:
        if not is_whole(value):
            raise refuse(name, "a list of token ids, which are whole numbers", value)
        if value < 0:
            raise ConfigError(f"{name} holds {value}, but token ids are 0 or positive.")
        if vocab_size is not None and value >= vocab_size:
            raise ConfigError(f"{name} holds {value}, but the target's vocabulary has ids 0 to {vocab_size - 1}.")


def check_logit_bias(name: str, value: object) -> None:
    """A mapping of token ids to numbers; which of them fit the vocabulary is known later."""
    if not isinstance(value, Mapping):
        raise refuse(name, "a mapping of token ids to numbers, such as {5: -1.0}", value)
    for token, bias in value.items():
        if not is_whole(token):
            raise refuse(name, "keyed by token ids, which are whole numbers", token)
        if not is_number(bias):
            raise refuse(f"{name} of token {token}", "a number", bias)


def path_of(name: str, value: object) -> str:
    """The text of a model's name or path."""
    if not isinstance(value, str | os.PathLike):
        raise refuse(name, "a name or a path (a hub id, a local folder, a GGUF file or a built-in name)", value)
    path = os.fspath(value)
    if not isinstance(path, str):
        raise refuse(name, "a path as text", value)
    return path
