"""What it takes to start a serving engine: the request in this package's words, the plan in the engine's.

Plain data that every engine's file shares; nothing here knows an engine, starts a process or opens a model.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dflash.launch.drafts import ServedDraft

PLATFORMS = ("nvidia", "amd", "cpu")
"""Kinds of machine for which an engine takes different flags."""

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class ServedTarget:
    """The target as an engine is given it."""

    location: str
    """Hub id, or the absolute path of a folder with config.json and safetensors."""
    name: str
    """What clients ask for: the hub id, or the name under which a folder is served."""
    revision: str | None = None
    architecture: str | None = None
    """First entry of the config's `architectures`; None if the config is not at hand (a hub id)."""
    num_layers: int | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None

    @property
    def is_local(self) -> bool:
        """Whether it is a folder, whose path no client should have to know."""
        return self.location != self.name


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """Everything that decides about the command."""

    target: ServedTarget
    draft: ServedDraft | None
    """None: serve the target alone, the baseline of a comparison."""
    platform: str
    """One of `PLATFORMS`."""
    host: str = "127.0.0.1"
    port: int | None = None
    """None: the engine's usual port."""
    width: int | None = None
    """Most rows per verification, anchor included; None = all that the draft proposes."""
    draft_backend: str | None = None
    """Attention backend of the draft, in the engine's own word; None = the documented one, else the engine's choice."""
    python: str | None = None
    """Interpreter of the environment that holds the engine; None: the engine's command on the path."""
    flags: tuple[str, ...] = ()
    """The user's own flags, handed through; they replace ours of the same name."""
    environment: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """The process's variables: what is set there already is left as it is."""

    @property
    def taps_last_layer(self) -> bool:
        """Whether the draft reads the output of the target's last layer, as far as the configs at hand tell. It has two
        readings: before the final norm (this package, vLLM) and after it (Transformers' hidden states)."""
        if self.draft is None or not self.draft.target_layer_ids:
            return False
        layers = self.target.num_layers or self.draft.num_target_layers
        return layers is not None and self.draft.target_layer_ids[-1] == layers - 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A command that can be shown, run and asked for its health."""

    engine: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Variables that are set beside the process's own."""
    url: str
    """Where clients connect, without a path."""
    install: str
    """How to get the engine, for the message when it is not there."""
    notes: tuple[str, ...] = ()
    """What the user should know: what the engine does otherwise than this package."""
    problems: tuple[str, ...] = ()
    """Why the engine will refuse or misread this; each names the cure."""

    @property
    def health_url(self) -> str:
        """Answers 200 as soon as the engine serves; the same path in vLLM and SGLang."""
        return f"{self.url}/health"

    def shell(self) -> str:
        """The plan as one command line for a POSIX shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, shlex.join(self.argv)])


Planner = Callable[[LaunchRequest], Plan]
"""An engine's file holds one: the request in, the plan out; raises nothing, problems are part of the plan."""


def reachable(host: str) -> str:
    """An address for clients on this machine: a server that listens everywhere is asked on the loopback."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host


def given(flags: tuple[str, ...], *names: str) -> bool:
    """Whether the user's flags name one of `names` ("--flag value" or "--flag=value")."""
    return any(flag.partition("=")[0] in names for flag in flags)


def value_of(flags: tuple[str, ...], *names: str) -> str | None:
    """The value the user gave one of `names`, the last one if there are several; None if absent or without value."""
    found: str | None = None
    for index, flag in enumerate(flags):
        name, has_value, value = flag.partition("=")
        if name in names:
            following = flags[index + 1] if index + 1 < len(flags) else None
            found = value if has_value else following
    return found


def merged(ours: Mapping[str, str | None], flags: tuple[str, ...], aliases: Mapping[str, str]) -> tuple[str, ...]:
    """Our flags (name -> value, None for a switch) that the user did not give, then the user's.

    `aliases` maps other spellings of ours to the name used in `ours`.
    """
    kept: list[str] = []
    for name, value in ours.items():
        spellings = [name, *(other for other, same in aliases.items() if same == name)]
        if not given(flags, *spellings):
            kept += [name] if value is None else [name, value]
    return (*kept, *flags)
