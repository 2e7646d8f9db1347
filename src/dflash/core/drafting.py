"""How a request drafts: from the choices of `Drafting` to the drafter's session that they lead to.

By default everything is decided by measured cost (`core/adaptive.py`). `fixed` is the other end: the draft's whole
block every round, as published implementations do, to compare with.
"""

from __future__ import annotations

from typing import Literal, Protocol

from dflash.core.adaptive import AdaptiveDrafter, Memory
from dflash.core.ngram import NgramDrafter
from dflash.core.parking import ParkingDrafter
from dflash.core.protocols import Drafter
from dflash.types import Drafting


class SharedDrafter(Protocol):
    """The weights side of a drafter."""

    def session(self) -> Drafter:
        """A fresh session."""
        ...


class CopyDrafter:
    """The drafter that needs no model: copies only. Shared side of `NgramDrafter`."""

    def __init__(self, max_proposal: int = 15) -> None:
        self._max_proposal = max_proposal

    def session(self) -> NgramDrafter:
        """A fresh drafter for one request."""
        return NgramDrafter(self._max_proposal)


def make_session(
    shared: SharedDrafter,
    drafting: Drafting,
    memory: Memory,
    *,
    max_rows: int,
    supports_trees: bool,
) -> AdaptiveDrafter | ParkingDrafter:
    """The drafter of one request.

    Args:
        max_rows: most rows of a verify forward that the engine has checked.
        supports_trees: of the target's session; without it chains are used in every mode.
    """
    if drafting.fixed:
        return ParkingDrafter(shared.session())
    trees: Literal["never", "auto", "always"] = "never"
    if supports_trees and drafting.mode != "exact":
        trees = "auto" if drafting.mode == "auto" else "always"
    only_copies = isinstance(shared, CopyDrafter)
    return AdaptiveDrafter(
        None if only_copies else shared.session(),
        memory,
        max_rows=max_rows if drafting.width is None else min(max_rows, drafting.width),
        copies=drafting.copies or only_copies,
        trees=trees,
    )
