"""Copying as a draft: an index of the n-grams of prompt and output, and the drafter that continues them.

What followed an earlier occurrence of the last few tokens often follows again: quotes, code, names, loops. The index
grows by one token in constant time and answers for any hypothetical continuation of the text, so that a copy can go on
where a draft model's block ends, and the other way round. Needs no model; knows tokens only.

A copy's chance to be right depends on how far its context matches and on whether earlier occurrences agreed on the
next token. `COPY_CHANCE` holds what was counted on 1,200 greedy answers of smollm2-135m (204,303 tokens); it is where
the estimate starts, accepts and rejects move it (`core/survival.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from dflash.types import Proposal

MAX_ORDER = 4
"""Longest n-gram that is a key; longer matches are measured backwards from its occurrences."""
MAX_MATCH = 24
"""Matches are measured up to this many tokens."""
NUM_KEPT = 3
"""Latest occurrences remembered per n-gram."""
MATCH_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, MAX_MATCH)
"""Upper ends of the classes of match lengths."""

Agreement = Literal["only", "agree", "differ"]
"""Whether the n-gram occurred once, or its remembered occurrences went on with the same token, or not."""

COPY_CHANCE: Mapping[Agreement, tuple[float, ...]] = MappingProxyType(
    {
        "only": (0.30, 0.59, 0.67, 0.74, 0.80, 0.83, 0.85, 0.89, 0.94),
        "agree": (0.52, 0.77, 0.83, 0.90, 0.92, 0.95, 0.96, 0.97, 0.99),
        "differ": (0.14, 0.37, 0.45, 0.45, 0.48, 0.57, 0.63, 0.71, 0.81),
    }
)
"""Counted chance of the best copy, per class of `MATCH_STEPS`."""
SECOND_CHANCE = 0.12
"""Counted chance of the runner-up, whatever its match."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A token that followed an earlier occurrence of the context."""

    token: int
    length: int
    """Tokens of the context that match, 1..MAX_MATCH."""
    chance: float
    """Probability that the target says it, as counted in other texts."""


class NgramIndex:
    """All n-grams of a growing text, n = 1..MAX_ORDER."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: tuple[dict[tuple[int, ...], tuple[int, ...]], ...] = tuple({} for _ in range(MAX_ORDER))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the text."""
        tokens, ends = self.tokens, self._ends
        for token in token_ids:
            end = len(tokens)
            for order in range(1, min(MAX_ORDER, end) + 1):
                key, table = tuple(tokens[end - order :]), ends[order - 1]
                table[key] = (end, *table.get(key, ())[: NUM_KEPT - 1])
            tokens.append(token)

    def copies(self, tail: Sequence[int]) -> list[Copy]:
        """What may follow a text that ends with `tail`, most likely first; at most two tokens, none without a match.

        `tail`: the last tokens of the text and whatever is supposed to follow it; MAX_MATCH of them say everything.
        """
        best: Copy | None = None
        for order in range(min(MAX_ORDER, len(tail)), 0, -1):
            ends = self._ends[order - 1].get(tuple(tail[len(tail) - order :]))
            if ends is None:
                continue
            found = [(self._match(end, tail, order), end) for end in ends]
            length, end = max(found)
            token = self.tokens[end]
            if best is None:
                best = Copy(token, length, _chance(length, self._agreement(ends, token)))
            others = [length for length, end in found if self.tokens[end] != best.token]
            if others:
                second = next(self.tokens[end] for length, end in found if self.tokens[end] != best.token)
                return [best, Copy(second, max(others), min(SECOND_CHANCE, 1 - best.chance))]
        return [] if best is None else [best]

    def _match(self, end: int, tail: Sequence[int], known: int) -> int:
        """Tokens before position `end` that equal the end of `tail`; `known` of them are known to."""
        tokens, length = self.tokens, known
        longest = min(MAX_MATCH, end, len(tail))
        while length < longest and tokens[end - 1 - length] == tail[-1 - length]:
            length += 1
        return length

    def _agreement(self, ends: Sequence[int], token: int) -> Agreement:
        if len(ends) == 1:
            return "only"
        return "agree" if all(self.tokens[end] == token for end in ends) else "differ"


def _chance(length: int, agreement: Agreement) -> float:
    step = next(index for index, upper in enumerate(MATCH_STEPS) if length <= upper)
    return COPY_CHANCE[agreement][step]


class NgramDrafter:
    """Copies as chains, without a model; implements `dflash.core.protocols.Drafter`.

    Proposes the best copy of each step until no n-gram of the text so far matches; `core/adaptive.py` cuts where it no
    longer pays.
    """

    def __init__(self, max_proposal: int = 15) -> None:
        self._index = NgramIndex()
        self._max_proposal = max_proposal

    @property
    def max_proposal(self) -> int:
        """Most tokens of one proposal."""
        return self._max_proposal

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        """Append to the text; features are not read."""
        self._index.extend(token_ids)

    def propose(self, anchor: int, budget: int) -> Proposal:
        """Copy up to `budget` tokens."""
        tail = [*self._index.tokens[1 - MAX_MATCH :], anchor]
        tokens: list[int] = []
        while len(tokens) < min(budget, self._max_proposal):
            copies = self._index.copies(tail[-MAX_MATCH:])
            if not copies:
                break
            tokens.append(copies[0].token)
            tail.append(copies[0].token)
        return Proposal(tuple(tokens))
