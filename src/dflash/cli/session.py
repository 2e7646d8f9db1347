"""Opening an engine from options, with a sign of life while it loads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflash.cli.errors import say
from dflash.cli.options import DEFAULT_BACKEND, ChainOptions, EngineOptions, ModelOptions
from dflash.cli.progress import working
from dflash.errors import ConfigError
from dflash.registry import backend_loader
from dflash.resolve import AUTO, refuse_missing

if TYPE_CHECKING:
    from dflash.core.engine import Engine


def open_engine(options: ModelOptions) -> Engine:
    """Load the target and draft that `options` name; no draft if the verb offers that and the user asked for it.

    Raises errors of `dflash.errors`.
    """
    plain = isinstance(options, ChainOptions) and options.no_draft
    exact = options.exact if isinstance(options, ChainOptions) else True
    if plain and options.width is not None:  # said here too, where the option that is in the way has a name
        raise ConfigError("--width limits the rows of rounds with drafts, which --no-draft leaves out: drop one.")
    if plain and options.draft != AUTO:
        say("note: --draft has no effect beside --no-draft.")
    drafting = options.drafting()
    backend = options.backend if isinstance(options, EngineOptions) else DEFAULT_BACKEND
    own = _backend_options(options, backend)
    refuse_missing(options.target, "target")
    if not plain:
        refuse_missing(options.draft, "draft")
    with working("starting") as progress:
        engine: Engine = loader(backend)(
            options.target,
            None if plain else options.draft,
            dtype=options.dtype,
            device=options.device,
            num_threads=options.threads,
            exact=exact,
            trust_remote_code=options.trust_remote_code,
            width=options.width,
            drafting=drafting,
            progress=progress,
            **own,
        )
    return engine


def loader(backend: str) -> Callable[..., Engine]:
    """The `load` of a backend. Raises ConfigError for an unknown one, MissingExtra where its library is missing."""
    import dflash

    return dflash.load if backend == DEFAULT_BACKEND else backend_loader(backend)


def _backend_options(options: ModelOptions, backend: str) -> dict[str, Any]:
    """What only one backend's `load` takes. Raises ConfigError where it was asked of another one."""
    if not isinstance(options, EngineOptions) or options.kv_bits is None:
        return {}
    if backend != "mlx":
        raise ConfigError("--kv-bits quantises keys and values on --backend mlx only: drop it, or name that backend.")
    return {"kv_bits": options.kv_bits}


def read_stdin() -> str:
    """Everything on standard input; bytes that are not UTF-8 are replaced."""
    return sys.stdin.buffer.read().decode("utf-8", errors="replace")
