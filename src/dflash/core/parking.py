"""Stop drafting when it is clearly of no use: a drafter around a drafter that gives up, says why, then costs nothing.

A draft that is misread or broken still gives the right text, only slowly, so nobody notices. Here the share of rounds
with at least one accepted draft token is watched: a weak draft has a third of them, a broken one next to none.
(Accepted per proposed tokens would not tell them apart: of fifteen tokens a useful draft may lose fourteen in every
round.) Framework-free, per request, for every drafter and shape of proposal; knows nothing of why acceptance is low.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from dflash.core.protocols import Drafter
from dflash.types import Proposal

WINDOW = 50
"""Rounds with a proposal that are looked back on."""
LEAST_SHARE = 0.05
"""Drafting stops if a smaller share of these rounds had an accepted draft token. A draft whose first token is right in
15 % of the rounds stops by bad luck in fewer than one of 60 windows, one at 25 % in fewer than one of 10 000."""


class AcceptanceWatch:
    """Looks back on the last rounds with a proposal and says when drafting is of no use."""

    def __init__(self, *, window: int = WINDOW, least_share: float = LEAST_SHARE) -> None:
        self._least_share = least_share
        self._accepted: deque[int] = deque(maxlen=window)
        self.reason: str | None = None
        """Why drafting should stop, in one sentence; None as long as it should not."""

    def add(self, num_accepted: int) -> None:
        """Count a round whose first `num_accepted` proposed tokens were right."""
        rounds = self._accepted
        rounds.append(num_accepted)
        useful = sum(count > 0 for count in rounds)
        if len(rounds) < (rounds.maxlen or 0) or useful >= self._least_share * len(rounds):
            return
        slots = [sum(count > slot for count in rounds) / len(rounds) for slot in range(max(1, *rounds))]
        shown = ", ".join(f"{share:.0%}" for share in slots)
        self.reason = (
            f"drafting stopped: only {useful} of the last {len(rounds)} rounds had an accepted draft token "
            f"(accepted by slot: {shown}); the text is not affected"
        )


class ParkingDrafter:
    """Implements `Drafter` over another one; once parked it proposes nothing and lets the other rest."""

    def __init__(self, drafter: Drafter, *, window: int = WINDOW, least_share: float = LEAST_SHARE) -> None:
        self._drafter = drafter
        self._watch = AcceptanceWatch(window=window, least_share=least_share)
        self._pending = False  # a proposal is out, and nothing has been observed since

    @property
    def reason(self) -> str | None:
        """Why drafting stopped, in one sentence; None as long as it goes on."""
        return self._watch.reason

    @property
    def notes(self) -> tuple[str, ...]:
        """Nothing is chosen here."""
        return ()

    @property
    def max_proposal(self) -> int:
        """That of the drafter."""
        return self._drafter.max_proposal

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        """Pass on; after a proposal, the tokens are the anchor and what was accepted."""
        if self.reason is not None:
            return
        if self._pending:
            self._pending = False
            self._watch.add(len(token_ids) - 1)
        if self.reason is None:
            self._drafter.observe(token_ids, features)

    def propose(self, anchor: int, budget: int) -> Proposal:
        """The drafter's proposal, or an empty one when parked."""
        if self.reason is not None:
            return Proposal()
        proposal = self._drafter.propose(anchor, budget)
        self._pending = bool(proposal.tokens)
        return proposal
