"""What is wrong with a recipe, in the words of its keys: where, what was given, what is allowed, what may be meant.

The validator (pydantic) finds the faults; its own sentences speak of inputs, models and parsing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeGuard

from pydantic import BaseModel, ValidationError

_WHOLE, _NUMBER = "a whole number", "a number"
_KINDS = {
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "model_type": "a section of keys",
    "model_attributes_type": "a section of keys",
    "invalid_key": "a key that is a text",
}
"""Type of fault -> what is allowed."""
_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}
_LONGEST_SHOWN = 40
_SIMILARITY = 0.6


def faults(error: ValidationError, recipe: type[BaseModel]) -> list[str]:
    """A sentence without full stop per fault, in the order in which they were found."""
    return [_fault(found, recipe) for found in error.errors()]


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a recipe as one writes it in an override: "optimizer.learning_rate". Sections come without keys of
    their own."""
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _fault(found: Mapping[str, Any], recipe: type[BaseModel]) -> str:
    place, kind, given, context = found["loc"], found["type"], found["input"], found.get("ctx", {})
    path = _path(place)
    if kind == "extra_forbidden":
        return f"{path}: there is no such key{_meant(place, recipe)}"
    if kind == "missing" and isinstance(place[-1], int):
        return f"{_path(place[:-1])} has too few entries: {_shown(given)}"
    if kind == "missing":
        return f"{path} is required{_described(place, recipe)}"
    if kind in ("too_long", "too_short"):
        limit = context.get("max_length", context.get("min_length"))
        return f"{path} must have {limit} entries, not {context['actual_length']}"
    if kind in _LIMITS:
        words, key = _LIMITS[kind]
        return f"{path} must be {words} {context[key]:g}, not {_shown(given)}"
    if kind == "literal_error":
        return f"{path} must be {context['expected']}, not {_shown(given)}"
    if kind in _KINDS:
        return f"{path} must be {_KINDS[kind]}, not {_shown(given)}"
    message = str(found["msg"]).removeprefix("Value error, ")
    return f"{path or 'recipe'}: {message}"


def _path(place: Sequence[str | int]) -> str:
    """("data", "answers", 0) -> "data.answers[0]"."""
    path = ""
    for step in place:
        path += f"[{step}]" if isinstance(step, int) and path else f".{step}" if path else str(step)
    return path


def _shown(given: object) -> str:
    if given is None:
        return "empty"
    text = repr(given)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 4]} ..."


def _meant(place: Sequence[str | int], recipe: type[BaseModel]) -> str:
    """The nearest key of the same section, else of another one, else what the section has."""
    name, section = str(place[-1]), _path(place[:-1])
    known = list(keys(recipe))
    here = [key for key in known if key.rpartition(".")[0] == section]
    own = get_close_matches(name, [key.rpartition(".")[2] for key in here], n=1, cutoff=_SIMILARITY)
    if own:
        return f"; did you mean {'.'.join(filter(None, [section, own[0]]))}?"
    elsewhere = get_close_matches(name, {key.rpartition(".")[2] for key in known}, n=1, cutoff=0.8)
    if elsewhere:
        return f"; did you mean {' or '.join(key for key in known if key.rpartition('.')[2] == elsewhere[0])}?"
    sections = [] if section else [key for key, field in recipe.model_fields.items() if _is_section(field.annotation)]
    return f" (there are {', '.join([*(key.rpartition('.')[2] for key in here), *sections])})"


def _described(place: Sequence[str | int], recipe: type[BaseModel]) -> str:
    """What a key is, in the words of its description."""
    section: type[BaseModel] = recipe
    for step in place[:-1]:
        inner = section.model_fields[str(step)].annotation
        if not _is_section(inner):
            return ""
        section = inner
    field = section.model_fields[str(place[-1])]
    text = field.description or (field.annotation.__doc__ if _is_section(field.annotation) else None)
    return f" ({text.strip().rstrip('.')})" if text else ""


def _is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    """Whether a field's annotation is a section of keys."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
