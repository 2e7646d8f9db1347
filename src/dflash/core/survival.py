"""How likely is a guess to be accepted? Estimates that start from a claim and follow what really happened.

A drafter claims a probability for a guess: its own max-probability, or what was counted for copies in other texts. A
claim may be wrong by a factor (a quantised head, sampling at a high temperature, text of another kind), so accepts and
rejects are counted per class: where the guess comes from, its slot, and how strong the claim is. With few counts the
estimate is the claim, with many it is the observed share. A source that claims too much everywhere is corrected as a
whole long before each of its classes has counts. Two levels: a request starts from what earlier requests on
the same engine taught, and departs from it where it differs.

None of this can change a text: estimates depend on the history only, and decide no more than how many guesses are fed.
"""

from __future__ import annotations

from bisect import bisect_right

Key = tuple[str, int, int]
"""(source of the guess, its slot, class of its claim)."""

CLAIM_STEPS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Borders between the classes of claims."""
STRENGTH = 12.0
"""Observations that the starting point of an estimate weighs as much as, on the level of an engine."""
REQUEST_STRENGTH = 40.0
"""The same on the level of a request, whose outcomes have moved the engine's estimate already."""
MEMORY = 400.0
"""Counts of a class are halved when they reach this, so that old texts fade."""


def claim_class(claim: float) -> int:
    """The class of a claimed probability, 0..len(CLAIM_STEPS)."""
    return bisect_right(CLAIM_STEPS, claim)


class Survival:
    """Counts of accepts and rejects per class, over those of a parent."""

    def __init__(self, parent: Survival | None = None) -> None:
        """`parent`: where estimates start from (the engine's counts, for those of a request); it learns as well."""
        self._parent = parent
        self._strength = STRENGTH if parent is None else REQUEST_STRENGTH
        self._classes: dict[Key, tuple[float, float]] = {}  # (accepted, all)
        self._sources: dict[str, tuple[float, float]] = {}  # (accepted, sum of what was expected)

    def estimate(self, key: Key, claim: float) -> float:
        """Probability in [0, 1] that a guess of this class and claim is accepted, given that those before it are."""
        accepted, claimed = self._sources.get(key[0], (0.0, 0.0))
        start = min(self._start(key, claim) * (accepted + self._strength) / (claimed + self._strength), 1.0)
        counts = self._classes.get(key)
        if counts is None:
            return start
        hits, total = counts
        return (hits + self._strength * start) / (total + self._strength)

    def update(self, key: Key, claim: float, accepted: float) -> None:
        """Count one guess whose predecessors were all accepted. `accepted`: 1 or 0, or where the target's probability
        of the guess is known that: it tells the same with less luck in it."""
        hits, total = self._classes.get(key, (0.0, 0.0))
        self._classes[key] = _faded(hits + accepted, total + 1)
        hits, claimed = self._sources.get(key[0], (0.0, 0.0))
        self._sources[key[0]] = _faded(hits + accepted, claimed + self._start(key, claim))
        if self._parent is not None:
            self._parent.update(key, claim, accepted)

    def _start(self, key: Key, claim: float) -> float:
        return claim if self._parent is None else self._parent.estimate(key, claim)


def _faded(hits: float, total: float) -> tuple[float, float]:
    return (hits, total) if total < MEMORY else (hits / 2, total / 2)
