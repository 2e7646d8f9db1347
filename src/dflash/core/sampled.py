"""Proposals that are drawn from the draft's distribution instead of being its first choice, and when they are better.

Where tokens are sampled, the first choice of a slot is accepted with p(arg max q). A token drawn from q_theta, the
draft's distribution at temperature theta, is accepted with sum_v min(p(v), q_theta(v)) under the rule of
arXiv:2211.17192. Which is more depends on the draft: a flat or badly scaled q makes drawing worthless, a faithful one
makes it better by far. So both are measured on the rows that were verified anyway, slot by slot, and the better one is
used. Drawing gives up the identity of texts by seed, not the target's distribution; only mode "fast" does it.

Never anticipating: how many slots are fed follows from these averages and from the draft's distributions, both fixed
before anything is drawn; the drawn tokens decide nothing but themselves. Hence only drafts whose slots do not depend on
one another are drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash.core.survival import Survival, claim_class
from dflash.types import CandidateTable, DrawnFrom, Proposal

THETAS = (0.25, 0.5, 0.7, 1.0, 1.5)
"""Temperatures of the draft that are compared. One that comes out far from 1 tells of a wrong scale of its logits."""
NUM_DRAWN = 16
"""Best candidates of a slot that are drawn from, renormalised."""
LEAST_ROWS = 32
"""Verified rows before a slot is drawn."""
MARGIN = 1.05
"""Times the acceptance of the first choice that drawing must have."""
KEPT = 400.0
"""Rows after which counts are halved, so that old texts fade."""


def draft_probs(ids: Sequence[int], log_probs: Sequence[float], theta: float) -> DrawnFrom:
    """q_theta over a slot's best candidates."""
    top = max(log_probs)
    weights = [math.exp((value - top) / theta) for value in log_probs]
    total = sum(weights)
    return DrawnFrom(tuple(ids), tuple(weight / total for weight in weights))


class Agreements:
    """Per slot, how often the first choice is accepted, and how often a drawn token would be at each temperature."""

    def __init__(self) -> None:
        self._sums: dict[int, list[float]] = {}  # slot -> rows, first choice, one per theta

    def add(self, slot: int, log_probs: Sequence[float], chances: Sequence[float]) -> None:
        """One verified row: the draft's candidates of this slot, best first, and the target's probabilities of them."""
        sums = self._sums.setdefault(slot, [0.0] * (2 + len(THETAS)))
        sums[0] += 1
        sums[1] += chances[0]
        for number, theta in enumerate(THETAS, start=2):
            drawn = draft_probs(range(len(log_probs)), log_probs, theta).probs
            sums[number] += sum(min(p, q) for p, q in zip(chances, drawn, strict=True))
        if sums[0] >= KEPT:
            self._sums[slot] = [value / 2 for value in sums]

    @property
    def num_slots(self) -> int:
        """Slots that were seen."""
        return max(self._sums, default=-1) + 1

    def first_choice(self, slot: int) -> float | None:
        """Mean acceptance of the first choice; None if no row was seen."""
        sums = self._sums.get(slot)
        return None if sums is None else sums[1] / sums[0]

    def best(self, slot: int) -> tuple[float, float] | None:
        """(theta, its mean acceptance) where drawing this slot is better than its first choice; None where not."""
        sums = self._sums.get(slot)
        if sums is None or sums[0] < LEAST_ROWS:
            return None
        number = max(range(2, len(sums)), key=lambda index: sums[index])
        if sums[number] <= MARGIN * sums[1]:
            return None
        return THETAS[number - 2], sums[number] / sums[0]


@dataclass(frozen=True, slots=True)
class DrawnPlan:
    """A chain that would be drawn: per slot the distribution, or a first choice."""

    slots: tuple[DrawnFrom | int, ...]
    value: float
    """Expected tokens it brings, less what its rows cost."""


class Drawing:
    """One request's use of drawn proposals."""

    def __init__(self, agreements: Agreements, survival: Survival, generator: np.random.Generator) -> None:
        self._agreements, self._survival, self._generator = agreements, survival, generator
        self._num_rounds = 0

    @property
    def note(self) -> str | None:
        """What was drawn and why, in one sentence; None if nothing was."""
        if not self._num_rounds:
            return None
        slots = []
        for slot in range(self._agreements.num_slots):
            best, first = self._agreements.best(slot), self._agreements.first_choice(slot)
            if best is not None and first is not None:
                slots.append(f"slot {slot + 1} at {best[0]:g} (accepted {best[1]:.2f} against {first:.2f})")
        shown = ", ".join(slots) or "no longer better"
        return f"drawn from the draft in {self._num_rounds} rounds, by draft temperature: {shown}"

    def learn(self, slot: int, table: CandidateTable, known: Mapping[int, float]) -> None:
        """The target's probabilities of one slot's candidates, in a row that was verified."""
        ids, log_probs = table.ids[slot], table.log_probs[slot]
        chances = [known[token] for token in ids]
        best = self._agreements.best(slot)
        if best is not None:
            overlap = sum(map(min, chances, draft_probs(ids, log_probs, best[0]).probs))
            self._survival.update(self._key(slot, log_probs), best[1], overlap)
        self._agreements.add(slot, log_probs, chances)

    def plan(
        self, table: CandidateTable, num_slots: int, line: Sequence[float], price: float, longest: float
    ) -> DrawnPlan | None:
        """The chain that is worth most of those that draw at least one slot; None where drawing is no better, or slots
        depend on one another. Nothing is drawn yet: the length must not depend on what will be.

        `line[r - 1]`: seconds of a forward of r rows, which must not exceed `longest`; `price`: tokens of a second.
        """
        if table.transitions is not None or self._agreements.num_slots == 0:
            return None
        slots: list[DrawnFrom | int] = []
        survival, phi, best = 1.0, 0.0, DrawnPlan((), 0.0)
        for slot, (ids, log_probs) in enumerate(zip(table.ids[:num_slots], table.log_probs[:num_slots], strict=True)):
            if line[slot + 1] > longest:
                break
            found = self._agreements.best(slot)
            if found is None:
                claim = math.exp(min(log_probs[0], 0.0))
                survival *= self._survival.estimate(("draft", slot + 1, claim_class(claim)), claim)
                slots.append(ids[0])
            else:
                survival *= self._survival.estimate(self._key(slot, log_probs), found[1])
                slots.append(draft_probs(ids, log_probs, found[0]))
            phi += survival
            value = phi - price * (line[slot + 1] - line[0])
            if value > best.value and any(isinstance(one, DrawnFrom) for one in slots):
                best = DrawnPlan(tuple(slots), value)
        return best if best.slots else None

    def draw(self, plan: DrawnPlan, *, reason: str) -> Proposal:
        """The proposal."""
        self._num_rounds += 1
        tokens = [
            slot if isinstance(slot, int) else slot.ids[self._generator.choice(len(slot.ids), p=slot.probs)]
            for slot in plan.slots
        ]
        drawn_from = tuple(None if isinstance(slot, int) else slot for slot in plan.slots)
        return Proposal(tuple(tokens), sources=("draft",) * len(tokens), reason=reason, drawn_from=drawn_from)

    def _key(self, slot: int, log_probs: Sequence[float]) -> tuple[str, int, int]:
        """Where the outcomes of drawing a slot are counted: by how sure the draft is, never by what was drawn."""
        return ("drawn", slot + 1, claim_class(math.exp(min(log_probs[0], 0.0))))
