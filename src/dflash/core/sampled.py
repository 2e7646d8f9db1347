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
from collections.abc import Sequence

from dflash.types import DrawnFrom

THETAS = (0.5, 0.7, 1.0)
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
