"""The ways to draft that an audit tries, so that every kind of round is compared with plain decoding.

Drafting by measured cost feeds what pays here, which may be little: a weak draft is not even asked. So beside the
engine as it was loaded there are whole blocks of the draft in every round, and rounds that feed whatever is guessed,
copies included, as chains and as trees: for these two, rows are declared to cost nothing. Framework-free.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.core.cost import CostTracker
from dflash.core.engine import Engine
from dflash.core.memory import Memory
from dflash.types import Drafting, Stats

WHOLE_BLOCKS = Drafting(fixed=True)


@dataclass(frozen=True)
class Form:
    """One way to draft."""

    name: str
    engine: Engine
    """The audited engine, or a twin of it that remembers other costs; the models are the same."""
    drafting: Drafting | None
    """None: as the engine was loaded."""
    chains_only: bool
    """Whether no branch is ever fed, so that equality may be promised."""


class FreeRows(CostTracker):
    """Costs at which every guess pays: all rows together cost what one does, and drafts nothing. Learns nothing."""

    def verify(self, rows: int, depth: int) -> float:
        """One second, whatever the rows."""
        return 1.0

    def steps(self, rows: int, depth: int) -> float:
        """As many plain steps: one."""
        return 1.0

    def line(self, depth: int, max_rows: int) -> Sequence[float]:
        """The same for 1..max_rows rows."""
        return [1.0] * max_rows

    def draft(self, depth: int) -> float:
        """Nothing."""
        return 0.0

    def saw_verify(self, rows: int, depth: int, seconds: float) -> None:
        """Real times are not of interest here."""

    def saw_draft(self, depth: int, seconds: float) -> None:
        """Nor are these."""


def forms_of(engine: Engine, *, supports_trees: bool) -> list[Form]:
    """Whole blocks first, then as loaded, all guesses in chains, and in trees where the target's states hold them."""
    loaded = engine.drafting
    chains_only = loaded.fixed or loaded.mode == "exact" or not supports_trees
    forms = [
        Form("whole blocks", engine, WHOLE_BLOCKS, chains_only=True),
        Form("as loaded", engine, None, chains_only=chains_only),
        Form("all guesses", _without_costs(engine), Drafting(mode="exact"), chains_only=True),
    ]
    if supports_trees:
        forms.append(Form("trees", _without_costs(engine), Drafting(mode="fast"), chains_only=False))
    return forms


def num_branch_rows(stats: Stats) -> int:
    """Guesses that were fed beside others for the same place."""
    return stats.num_proposed - sum(stats.proposed_per_slot)


def _without_costs(engine: Engine) -> Engine:
    twin = copy.copy(engine)
    twin.memory = Memory(FreeRows())
    return twin
