"""What may come next at a node: the draft's candidates and the copies of earlier text, as one list of guesses.

Both sources are asked at every node, so a chain may begin with one and go on with the other, and a tree holds both. A
guess that both make is likelier than either says; guesses that contradict one another take from each other what
independent evidence would. The result is a claim, which `core/survival.py` turns into an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.core.ngram import MAX_MATCH, NgramIndex
from dflash.core.survival import Key, Survival, claim_class
from dflash.types import CandidateTable

DRAFT, COPY, BOTH = "draft", "copy", "both"


@dataclass(frozen=True, slots=True)
class Guess:
    """One token that may follow a node."""

    token: int
    source: str
    chance: float
    """Estimated probability that the target says it here."""
    key: Key
    """Where its outcome is counted."""
    claim: float
    rank: int
    """Its row in the candidate table's slot, -1 if it is not there."""


@dataclass(frozen=True, slots=True)
class Node:
    """A guess in its place; the root is the anchor."""

    guess: Guess | None
    parent: int
    """Row of the parent."""
    path: tuple[int, ...]
    """Draft tokens from the anchor to this one."""
    survival: float
    """Estimated probability that the whole path is accepted."""
    on_course: bool
    """Whether the path is what the draft itself would have proposed: later slots count on that."""


ROOT = Node(None, 0, (), 1.0, True)


class Guesses:
    """The guesses of one round. Asking for the same node twice gives the same answer."""

    def __init__(
        self,
        survival: Survival,
        *,
        index: NgramIndex | None = None,
        tail: Sequence[int] = (),
        table: CandidateTable | None = None,
        branching: int = 1,
    ) -> None:
        """
        Args:
            index, tail: the text so far and its last tokens, the anchor included; None = no copies.
            table: the draft's candidates; None = it was not asked.
            branching: candidates of the table considered per node.
        """
        self._survival = survival
        self._index = index
        self._tail = list(tail[-MAX_MATCH:])
        self._table = table
        self._branching = branching

    def after(self, node: Node) -> list[Guess]:
        """Guesses for the token behind `node`, likeliest first; their chances add up to 1 at most."""
        claims: dict[int, tuple[float, str, int]] = {}
        drafted = self._drafted(node)
        copies = [] if self._index is None else self._index.copies([*self._tail, *node.path])
        best_draft = max((claim for _, claim, _ in drafted), default=0.0)
        best_copy = copies[0].chance if copies else 0.0
        for token, claim, rank in drafted:
            against = best_copy if not copies or copies[0].token != token else 0.0
            claims[token] = (_contested(claim, against), DRAFT, rank)
        likeliest = drafted[0][0] if drafted else -1
        for copy in copies:
            known = claims.get(copy.token)
            if known is not None:
                claim = next(claim for token, claim, _ in drafted if token == copy.token)
                claims[copy.token] = (1 - (1 - claim) * (1 - copy.chance), BOTH, known[2])
            else:
                against = best_draft if copy.token != likeliest else 0.0
                claims[copy.token] = (_contested(copy.chance, against), COPY, -1)
        guesses = [self._guess(node, token, *claim) for token, claim in claims.items()]
        guesses.sort(key=lambda guess: -guess.chance)
        return _at_most_one(guesses)

    def child(self, node: Node, row: int, guess: Guess) -> Node:
        """The node of `guess` behind `node`, which is fed in row `row`."""
        on_course = node.on_course and guess.rank == 0
        return Node(guess, row, (*node.path, guess.token), node.survival * guess.chance, on_course)

    def _guess(self, node: Node, token: int, claim: float, source: str, rank: int) -> Guess:
        slot = len(node.path) + 1 if source != COPY else 0
        kind = source if node.on_course or source == COPY else f"{source}, off course"
        key = (kind, slot, claim_class(claim))
        return Guess(token, source, self._survival.estimate(key, claim), key, claim, rank)

    def _drafted(self, node: Node) -> list[tuple[int, float, int]]:
        """(token, claim, rank) of the table's candidates behind `node`, likeliest first."""
        table, slot = self._table, len(node.path)
        if table is None or slot >= len(table.ids):
            return []
        rank = -1 if node.guess is None else node.guess.rank
        scores = table.log_probs[slot]
        if table.transitions is not None and slot and rank >= 0:
            scores = table.transitions[slot - 1][rank]
        order = range(len(scores))
        if table.transitions is not None:
            order = sorted(order, key=lambda column: -scores[column])  # type: ignore[assignment]
        ids = table.ids[slot]
        return [(ids[column], math.exp(min(scores[column], 0.0)), column) for column in order[: self._branching]]


def _contested(claim: float, against: float) -> float:
    """A claim that another source contradicts with `against`: both cannot be right, and are taken as independent."""
    both = claim * against
    return claim * (1 - against) / (1 - both) if both < 1 else 0.5


def _at_most_one(guesses: list[Guess]) -> list[Guess]:
    total = sum(guess.chance for guess in guesses)
    if total <= 1:
        return guesses
    return [
        Guess(guess.token, guess.source, guess.chance / total, guess.key, guess.claim, guess.rank) for guess in guesses
    ]
