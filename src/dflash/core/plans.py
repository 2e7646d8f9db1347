"""How many of a list of guesses to feed, what that is worth, and what it was worth in the light of further guesses.

Time is weighed against tokens by a price: the tokens that a second brings elsewhere (`core/adaptive.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.core.guesses import ROOT, Guesses, Node
from dflash.core.memory import COPY_STEPS

CAUTION = 1.3
"""Factor on the price of fed rows. Replayed on recorded answers of smollm2-135m, 1.0 to 1.3 give the same mean speed-up
within 1 %, but the fewer rows are risked, the less an unlucky short answer loses."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Nodes, parents first, and how many of them to feed."""

    nodes: list[Node]
    num_fed: int
    value: float
    """Phi - price * extra seconds of the verify forward, in tokens."""
    tokens: float
    """Expected of the round, the target's own included."""
    seconds: float
    """Of the verify forward."""

    @property
    def copy_class(self) -> int:
        """Class of a round by the chance of its best copy; 0 = nothing to copy."""
        return 0 if not self.nodes else bisect_right(COPY_STEPS, self.nodes[0].survival)


def best_plan(nodes: list[Node], line: Sequence[float], price: float, longest: float) -> Plan:
    """How many of the nodes to feed; `line[r - 1]`: seconds of a forward of r rows, which must not exceed `longest`."""
    phi, best, worth = 0.0, 0, 0.0
    value, tokens = 0.0, 1.0
    for number, node in enumerate(nodes, start=1):
        extra = line[number] - line[0]
        if line[number] > longest:
            break
        phi += node.survival
        if phi - CAUTION * price * extra > worth:
            best, worth = number, phi - CAUTION * price * extra
            value, tokens = phi - price * extra, 1 + phi
    return Plan(nodes, best, value, tokens, line[best])


def reconsidered(plan: Plan, guesses: Guesses, line: Sequence[float], price: float) -> float:
    """What a plan is worth in the light of further guesses. What the draft adds is counted from there: it also tells
    where a copy is wrong, and copies that promise too much must not hide what it is good for."""
    nodes, phi = [ROOT], 0.0
    for node in plan.nodes[: plan.num_fed]:
        parent = nodes[node.parent]
        guess = next((guess for guess in guesses.after(parent) if guess.token == node.path[-1]), None)
        if guess is None:
            nodes.append(Node(None, node.parent, node.path, 0.0, False))
            continue
        nodes.append(guesses.child(parent, node.parent, guess))
        phi += nodes[-1].survival
    return phi - price * (line[plan.num_fed] - line[0])
