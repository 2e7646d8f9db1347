"""Simulated machines and drafts: decoding without models, in seconds that a formula gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from dflash.types import Proposal


class Machine:
    """A clock that forwards move: seconds by rows."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        self.cost, self.now = cost, 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedDraft:
    """Right with a probability that it knows, slot by slot; a forward takes `seconds`."""

    max_proposal = 15

    def __init__(
        self, machine: Machine, text: Sequence[int], shares: Sequence[float], seconds: float, seed: int = 1
    ) -> None:
        self._machine, self._text, self._shares, self._seconds = machine, text, shares, seconds
        self._rng = np.random.default_rng(seed)
        self._num_seen = self.num_asked = 0

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        self._num_seen += len(token_ids)

    def propose(self, anchor: int, budget: int) -> Proposal:
        self._machine.now += self._seconds
        self.num_asked += 1
        tokens, claims = [], []
        for slot in range(min(budget, self.max_proposal)):
            share = self._shares[min(slot, len(self._shares) - 1)]
            claim = float(np.clip(self._rng.beta(2, 2 / share - 2), 0.01, 0.99)) if share else 0.5
            right = share > 0 and self._rng.random() < claim
            position = self._num_seen + 1 + slot
            tokens.append(self._text[position] if right and position < len(self._text) else -1)
            claims.append(math.log(claim))
        return Proposal(tuple(tokens), log_probs=tuple(claims))


def seconds_per_token(
    machine: Machine, text: Sequence[int], propose: Callable[[int, int], Proposal], observe: Any
) -> float:
    """Decode `text` behind its first token; `propose`, verify and `observe` move the clock."""
    position = 0
    while position < len(text) - 1:
        proposal = propose(text[position], len(text) - position - 2) if position < len(text) - 2 else Proposal()
        machine.now += machine.cost(len(proposal.tokens) + 1)
        kept = 1
        for token in proposal.tokens:
            if position + kept >= len(text) or token != text[position + kept]:
                break
            kept += 1
        kept = min(kept, len(text) - 1 - position)
        observe(text[position : position + kept], None)
        position += kept
    return machine.now / (len(text) - 1)


CURVES: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "flat to 64 (GPU)": lambda rows: 1.0 if rows <= 64 else 1 + 0.02 * (rows - 64),
        "linear (CPU)": lambda rows: 1 + 0.13 * (rows - 1),
        "experts (MoE)": lambda rows: 1 + 0.35 * (rows - 1) ** 0.8,
        "batch of 8": lambda rows: 1 + max(0.0, 8 * rows - 32) * 0.05,
        "batch of 32": lambda rows: 1 + max(0.0, 32 * rows - 32) * 0.03,
    }
)
DRAFT_SECONDS = 0.12
