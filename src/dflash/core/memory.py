"""What requests of one engine teach the next ones: costs, how guesses fare, and whether the draft is worth its forward.

Costs hold for the machine. The rest depends on how tokens are drawn, since a guess that is the target's first choice is
right in every greedy round and in a share of the sampled ones; so it is kept apart by temperature. Decides speed, never
text.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from dflash.core.cost import CostTracker
from dflash.core.sampled import Agreements
from dflash.core.survival import Survival

COPY_STEPS = (0.0, 0.35, 0.65, 0.85)
"""Borders between the classes of a round's best copy, in which the draft's use is followed apart: a draft may be worth
its forward only where there is nothing to copy."""
NUM_CLASSES = len(COPY_STEPS) + 1
TRIALS = 24
"""Drafts before their use is judged."""
POOLED_WEIGHT = 4
"""Drafts of its own class that the mean over all classes weighs as much as."""
PROBING = 0.003
"""Tokens per round that trying a resting draft may lose on average."""
HYSTERESIS = 0.1
"""Share by which the draft's gain must leave its price before the decision changes."""
SLOW = 1 / 16
"""Share of the newest round in a running average."""
TREE_GAIN, TREE_KEPT = 1.10, 1.05
"""Trees are taken in mode "auto" only if they bring at least so many times the tokens per second of chains, and left if
it is less than the second figure, so that they do not come and go with every text."""
STEADY = 1 / 256
"""Share of the newest round in what this is judged by."""
TREE_ROUNDS = 64
"""Rounds that this is judged by, at least."""
TEMPERATURES = (0.0, 0.5, 0.9)
"""Upper ends of the classes of sampling temperatures; the last class is above them."""


@dataclass
class Average:
    """Mean of the first values, then a running one."""

    value: float = 0.0
    count: int = 0
    slow: float = SLOW
    """Least share of the newest value."""

    def add(self, value: float) -> None:
        """Take one more value in."""
        self.count += 1
        self.value += (value - self.value) * max(1 / self.count, self.slow)


class Rate:
    """Tokens per second that rounds are expected to bring, over all of them: long rounds count for as long as they
    last."""

    def __init__(self) -> None:
        self._tokens, self._seconds = Average(slow=STEADY), Average(slow=STEADY)

    def add(self, tokens: float, seconds: float) -> None:
        """One more round."""
        self._tokens.add(tokens)
        self._seconds.add(seconds)

    @property
    def count(self) -> int:
        """Rounds."""
        return self._tokens.count

    @property
    def value(self) -> float:
        """Tokens per second; 0 before the first round."""
        return self._tokens.value / self._seconds.value if self.count else 0.0


@dataclass(slots=True)
class Rest:
    """Whether the draft is asked in one class of rounds, with hysteresis, and when it is tried again if not: the less a
    try is expected to lose, the sooner."""

    asking: bool = True
    waited: int = 0

    def asks(self, gain: float | None, needed: float) -> bool:
        """`gain`: tokens that asking will add, if known; `needed`: tokens that its time would bring otherwise."""
        if gain is None:
            return True
        self.asking = gain > needed * (1 - HYSTERESIS if self.asking else 1 + HYSTERESIS)
        self.waited = 0 if self.asking else self.waited + 1
        return self.asking or self.waited * PROBING >= needed - gain

    def asked(self) -> None:
        """The draft was asked."""
        self.waited = 0


class Lessons:
    """What was learned at one class of temperatures."""

    def __init__(self) -> None:
        self.survival = Survival()
        self.rests = [Rest() for _ in range(NUM_CLASSES)]
        self.gains = [Average() for _ in range(NUM_CLASSES)]
        """Tokens per round that the draft added, by class of the round's best copy."""
        self.gain = Average()
        """The same over all rounds."""
        self.chain, self.tree = Rate(), Rate()
        """Of the best chain and of the best tree of the same rounds, where both were weighed."""
        self.num_rounds = 0
        """All rounds, weighed or not."""
        self._trees_won = False
        self.agreements = Agreements()

    def add_gain(self, kind: int, tokens: float) -> None:
        """A draft added so many expected tokens to a round of class `kind`."""
        self.gains[kind].add(tokens)
        self.gain.add(tokens)

    def expected_gain(self, kind: int) -> float | None:
        """What a draft will add in a round of this class; None as long as that is not known."""
        if self.gain.count < TRIALS:
            return None
        own = self.gains[kind]
        count = min(own.count, int(1 / SLOW))
        return (count * own.value + POOLED_WEIGHT * self.gain.value) / (count + POOLED_WEIGHT)

    def judge_trees(self) -> bool:
        """Whether trees have been shown to be worth leaving bit-exactness for; once they were, by a lower bar."""
        bar = TREE_KEPT if self._trees_won else TREE_GAIN
        self._trees_won = self.tree.count >= TREE_ROUNDS and self.tree.value >= bar * self.chain.value
        return self._trees_won


class Memory:
    """Of one engine."""

    def __init__(self, costs: CostTracker | None = None) -> None:
        self.costs = costs or CostTracker()
        self._lessons = [Lessons() for _ in range(len(TEMPERATURES) + 1)]

    def at(self, temperature: float) -> Lessons:
        """What was learned from requests of such a temperature."""
        return self._lessons[bisect_left(TEMPERATURES, temperature)]
