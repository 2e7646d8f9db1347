"""What a dialect is, and how a value is looked up: at every place it may stand, with a contradiction as an error.

Knows no dialect. A value is read from named levels of a config.json (say `dflash_config` and the top level) that must
agree where both have it; what was read is remembered, so that the resolved description can say where it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.core.draft_config import DraftConfig
from dflash.errors import CheckpointError

NESTED, TOP = "dflash_config", "the top level"
_LARGEST = 2**40
"""No size, id or count of a draft comes near it."""


@dataclass(frozen=True)
class Checkpoint:
    """What a reader may look at: the parsed config.json and the names and shapes of the tensors."""

    raw: Mapping[str, Any]
    source: str
    """Names the file in messages."""
    shapes: Mapping[str, tuple[int, ...]] | None = None
    """Tensor name -> shape; None where only the config is at hand. Names are as stored while the dialect is sought,
    and this project's (`Dialect.canonical`) when it resolves."""

    def level(self, key: str) -> Mapping[str, Any]:
        """A nested object of the config (empty if absent). Raises CheckpointError if it is none."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise CheckpointError(f"{self.source}: {key} must be an object, not {value!r}.")
        return value or {}

    @property
    def architectures(self) -> tuple[str, ...]:
        """Class names that the config states."""
        value = self.raw.get("architectures")
        return tuple(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else ()

    def has_tensor(self, *suffixes: str) -> bool:
        """Whether a stored tensor's name ends with one of `suffixes`."""
        return any(name.endswith(suffixes) for name in self.shapes or ())


@dataclass(frozen=True)
class Dialect:
    """One way of writing a draft down. A new one is a file with this and a line in `registry.DIALECTS`."""

    name: str
    """As shown to users and used by `dflash convert --to`."""
    matches: Callable[[Checkpoint], bool]
    """Whether a checkpoint is written in it; asked in the registry's order, the first yes decides."""
    resolve: Callable[[Checkpoint, Lookup], DraftConfig]
    """The one description; raises CheckpointError for gaps and contradictions, UnsupportedModel for other networks."""
    levels: Callable[[Checkpoint], Sequence[tuple[str, Mapping[str, Any]]]] = field(
        default=lambda found: ((NESTED, found.level(NESTED)), (TOP, found.raw))
    )
    """Where its keys stand, in the order of looking."""
    canonical: Callable[[str], str | None] = field(default=lambda name: name)
    """Stored tensor name -> this project's name, or None for a tensor that inference does not use."""
    stored: Callable[[str], str] = field(default=lambda name: name)
    """The reverse, for writing."""
    write: Callable[[DraftConfig], dict[str, Any]] | None = None
    """The config.json of a description; None where this project does not write the dialect."""


@dataclass(frozen=True)
class Lookup:
    """Values of one config.json, with the places they were found at."""

    source: str
    levels: Sequence[tuple[str, Mapping[str, Any]]]
    origins: dict[str, str] = field(default_factory=dict)
    """Key -> where it was read, filled while reading."""
    notes: list[str] = field(default_factory=list)
    """What a reader left out on purpose, in words."""

    def find(self, *keys: str) -> Any:
        """The value that every level which has one of `keys` agrees on; None if none has."""
        found = [(label, key, level[key]) for label, level in self.levels for key in keys if level.get(key) is not None]
        if not found:
            return None
        label, key, value = found[0]
        for other_label, other_key, other in found[1:]:
            if other != value or isinstance(other, bool) != isinstance(value, bool):
                raise CheckpointError(
                    f"{self.source} states {keys[0]} twice and differently ({key} {value} in {label}, {other_key} "
                    f"{other} in {other_label}); keep the value the draft was trained with."
                )
        self.origins[keys[0]] = label if key == keys[0] else f"{label}, {key}"
        return value

    def decided(self, key: str, why: str) -> None:
        """Record a value that is not read from one key but follows from a rule."""
        self.origins[key] = why

    def required(self, *keys: str) -> Any:
        """As `find`; a missing value is a CheckpointError."""
        value = self.find(*keys)
        if value is None:
            raise CheckpointError(
                f"{self.source} has no '{keys[0]}'. It is never guessed, since a wrong value only shows as lost speed; "
                "add the value the draft was trained with."
            )
        return value

    def integer(self, *keys: str) -> int:
        """A required integer."""
        value = self.required(*keys)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _LARGEST:
            raise CheckpointError(f"{self.source}: {keys[0]} must be an integer, not {_short(value)}.")
        return value

    def number(self, *keys: str) -> float:
        """A required number."""
        return as_number(self.required(*keys), keys[0], self.source)

    def integers(self, *keys: str) -> tuple[int, ...]:
        """A required list of integers."""
        value = self.required(*keys)
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise CheckpointError(f"{self.source}: {keys[0]} must be a list of integers, not {_short(value)}.")
        return tuple(value)

    def optional_integer(self, *keys: str) -> int | None:
        """An integer, or None if it is not stated."""
        return None if self.find(*keys) is None else self.integer(*keys)

    def optional_number(self, *keys: str) -> float | None:
        """A number, or None if it is not stated."""
        return None if self.find(*keys) is None else self.number(*keys)

    def flag(self, *keys: str) -> bool | None:
        """True, False, or None if it is not stated."""
        value = self.find(*keys)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.source}: {keys[0]} must be true or false, not {_short(value)}.")
        return value

    def optional_text(self, *keys: str) -> str | None:
        """A text, or None if it is not stated."""
        value = self.find(*keys)
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{self.source}: {keys[0]} must be a text, not {_short(value)}.")
        return value

    def file_name(self, *keys: str) -> str | None:
        """The plain name of a file beside the config, or None if it is not stated."""
        value = self.find(*keys)
        if value is not None and not is_plain_name(value):
            raise CheckpointError(f"{self.source}: {keys[0]} must be a plain file name, not {_short(value)}.")
        return None if value is None else str(value)


def is_plain_name(value: object) -> bool:
    """Whether a text names a file in its own folder and nothing else."""
    return (
        isinstance(value, str)
        and bool(value)
        and value not in (".", "..")
        and Path(value).name == value
        and not any(sign in value for sign in "\\:\0")
    )


def as_number(value: object, key: str, source: str) -> float:
    """A JSON number. Raises CheckpointError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e18:
        raise CheckpointError(f"{source}: {key} must be a number, not {_short(value)}.")
    return float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
