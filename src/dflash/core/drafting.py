"""How a request drafts: from the choices of `Drafting` to the drafter's session that they lead to.

By default everything is decided by measured cost (`core/adaptive.py`). `fixed` is the other end: the draft's whole
block every round, as published implementations do, to compare with.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

from dflash.core.adaptive import AdaptiveDrafter
from dflash.core.bigrams import Bigrams
from dflash.core.draws import draft_generator
from dflash.core.exactness import PROBED_WIDTH
from dflash.core.memory import Memory
from dflash.core.ngram import NgramDrafter
from dflash.core.pair import check_width
from dflash.core.parking import ParkingDrafter
from dflash.core.protocols import Drafter
from dflash.errors import ConfigError
from dflash.types import Clock, Drafting, SamplingParams

_GREEDY = SamplingParams()


class SharedDrafter(Protocol):
    """The weights side of a drafter."""

    def session(self) -> Drafter:
        """A fresh session."""
        ...


@runtime_checkable
class ClosableDrafter(SharedDrafter, Protocol):
    """One that has put something on a model of its own."""

    def close(self) -> None:
        """Leave the model as it was found; sessions made before must not be used any more."""
        ...


class CopyDrafter:
    """The drafter that needs no model: copies only. Shared side of `NgramDrafter`."""

    def __init__(self, max_proposal: int = 15) -> None:
        self._max_proposal = max_proposal

    def session(self) -> NgramDrafter:
        """A fresh drafter for one request."""
        return NgramDrafter(self._max_proposal)


def engine_drafting(drafting: Drafting | None, width: int | None, num_rows: int | None, *, has_model: bool) -> Drafting:
    """The choices of an engine with their width.

    Args:
        drafting, width: of the backend's `load`; the latter goes before.
        num_rows: of the draft's block; None = no draft.
        has_model: whether the draft is one; copies have no block that would limit fixed rounds.

    Raises ConfigError for a width that has no effect.
    """
    drafting = drafting or Drafting()
    drafting = dataclasses.replace(drafting, width=drafting.width if width is None else width)
    widest = num_rows if num_rows is None or (drafting.fixed and has_model) else max(PROBED_WIDTH, num_rows)
    check_width(drafting.width, widest)
    return drafting


def make_session(
    shared: SharedDrafter,
    drafting: Drafting,
    memory: Memory,
    *,
    max_rows: int,
    supports_trees: bool,
    bigrams: Bigrams | None = None,
    params: SamplingParams = _GREEDY,
    clock: Clock = time.perf_counter,
) -> AdaptiveDrafter | ParkingDrafter:
    """The drafter of one request.

    Args:
        max_rows: most rows of a verify forward that the engine has checked.
        supports_trees: of the target's session; without it chains are used in every mode.
        bigrams: counted beside the draft.
        params: the request's; where it samples, mode "fast" may draw from the draft's distribution.
        clock: seconds, by which rounds are timed.

    Raises ConfigError for a draft window below 1, or where this drafter has no context that could be limited.
    """
    session = _fresh(shared, drafting)
    if drafting.fixed:
        return ParkingDrafter(session)
    trees: Literal["never", "auto", "always"] = "never"
    if supports_trees and drafting.mode != "exact":
        trees = "auto" if drafting.mode == "auto" else "always"
    draws = drafting.mode == "fast" and drafting.draws and params.temperature > 0
    only_copies = isinstance(shared, CopyDrafter)
    return AdaptiveDrafter(
        None if only_copies else session,
        memory,
        max_rows=max_rows if drafting.width is None else min(max_rows, drafting.width),
        copies=drafting.copies or only_copies,
        bigrams=bigrams if drafting.bigrams else None,
        trees=trees,
        temperature=params.temperature,
        generator=draft_generator(params.seed) if draws else None,
        clock=clock,
        steady=drafting.steady,
    )


def _fresh(shared: SharedDrafter, drafting: Drafting) -> Drafter:
    """A session with the draft window that was asked for."""
    session = shared.session()
    window = drafting.draft_window
    if window is None:
        return session
    if window < 1:
        raise ConfigError(f"the draft window must be at least 1 token, not {window}.")
    limit: Callable[[int], None] | None = getattr(session, "limit_context", None)
    if limit is None:
        raise ConfigError(
            "a draft window is for drafts of blocks, which keep context rows of their own; leave it out with this one."
        )
    limit(window)
    return session
