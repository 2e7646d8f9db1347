"""How many guesses to feed, and whether to ask the draft at all: a drafter that decides by measured cost.

Each round it gathers guesses (copies of earlier text, which cost nothing, and the draft's candidates, which cost a
forward), estimates how likely each is to be accepted (`core/survival.py`), and feeds as many as pay:

    choose N to maximise  Phi(N) - price * (C(N + 1) - C(1))          Phi = sum of the survivals of the N nodes fed

C is the measured cost of a forward by its rows (`core/cost.py`), and the price of a second is the number of tokens a
second brings on average, times a margin of caution. For equal rounds that maximises tokens per second, as the ratio
rule of arXiv:2606.01813 does; where rounds differ it spends time where it brings most. N may be 0, a plain step. The
draft is asked when what it has lately added, in tokens, exceeds the price of its forward; while it rests it is tried
again at growing intervals.

Nothing here can change a text. All guesses are point masses fixed before the target's draw, and how many of them are
fed is a function of the history, so any choice is lossless at any temperature, and in the bit-exact width class it
changes no bit. Wrong costs or estimates only make decoding slower.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dflash.core.cost import CostTracker
from dflash.core.guesses import COPY, DRAFT, Guesses, Node
from dflash.core.ngram import MAX_MATCH, NgramIndex
from dflash.core.parking import AcceptanceWatch
from dflash.core.protocols import Drafter
from dflash.core.survival import Survival
from dflash.core.tree import grow_chain, grow_tree
from dflash.types import CandidateTable, Proposal

COPY_STEPS = (0.0, 0.35, 0.65, 0.85)
"""Borders between the classes of a round's best copy, in which the draft's use is followed apart: a draft may be worth
its forward only where there is nothing to copy."""
NUM_CLASSES = len(COPY_STEPS) + 1
TRIALS = 8
"""Drafts before their use is judged."""
POOLED_WEIGHT = 4
"""Drafts of its own class that the mean over all classes weighs as much as."""
FIRST_REST, LONGEST_REST = 8, 32
"""Rounds until a resting draft is tried again; doubled at each trial that fails."""
WATCHED = 150
"""Drafts that the alarm for broken drafts looks back on: more than where drafting is fixed, since a weak draft is asked
seldom here anyway and must not be stopped by bad luck."""
CAUTION = 1.3
"""Factor on the price of fed rows. Simulated on 150 greedy answers of smollm2-135m, 1.0 to 1.6 give the same mean
speed-up (1.54, 1.55, 1.54), but the fewer rows are risked, the less an unlucky short answer loses (0.94, 0.96, 0.98 of
plain speed at worst)."""
HYSTERESIS = 0.1
"""Share by which the draft's gain must leave its price before the decision changes."""
LEAST = 0.005
"""Guesses that are accepted less often are never fed."""
NARROW, BROAD = 2, 4
"""Candidates per slot that the draft is asked for: chains, trees."""
UNKNOWN_CLAIM = math.log(0.7)
"""Of a drafter that gives no probabilities: where the estimate starts."""
SLOW = 1 / 16
"""Share of the newest round in a running average."""
TREE_GAIN = 1.10
"""Trees are taken in mode "auto" only if they bring at least so many times the tokens per second of chains."""
TREE_ROUNDS = 64
"""Rounds that this is judged by, at least."""


class TableDrafter(Drafter, Protocol):
    """A drafter that can say what it thinks of each slot instead of settling on tokens."""

    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        """The `count` best candidates of at most `budget` slots behind the anchor."""
        ...


@dataclass
class Average:
    """Mean of the first values, then a running one."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Take one more value in."""
        self.count += 1
        self.value += (value - self.value) * max(1 / self.count, SLOW)


class Memory:
    """What requests of one engine teach the next ones; decides speed, never text."""

    def __init__(self, costs: CostTracker | None = None) -> None:
        self.costs = costs or CostTracker()
        self.survival = Survival()
        self.gains = [Average() for _ in range(NUM_CLASSES)]
        """Tokens per round that the draft added, by class of the round's best copy."""
        self.gain = Average()
        """The same over all rounds."""
        self.chain, self.tree = Average(), Average()
        """Expected tokens per second of the best chain and of the best tree, where both were weighed."""

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

    @property
    def trees_win(self) -> bool:
        """Whether trees have been shown to be worth leaving bit-exactness for."""
        return self.tree.count >= TREE_ROUNDS and self.tree.value >= TREE_GAIN * self.chain.value


@dataclass(frozen=True, slots=True)
class _Plan:
    """Nodes, parents first, and how many of them to feed."""

    nodes: list[Node]
    num_fed: int
    value: float
    """Phi - price * extra seconds of the verify forward, in tokens."""
    rate: float
    """Expected tokens per second of the round, the draft's time left out."""


@dataclass(slots=True)
class _Open:
    """Guesses whose outcome is not known yet: the next token's position, and the row it would be a child of."""

    position: int
    row: int
    nodes: list[Node]


class AdaptiveDrafter:
    """Implements `dflash.core.protocols.Drafter` over copies and at most one draft."""

    def __init__(
        self,
        draft: Drafter | None,
        memory: Memory,
        *,
        max_rows: int,
        copies: bool = True,
        trees: Literal["never", "auto", "always"] = "never",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            draft: a fresh session; None = copies only.
            memory: of the engine; learns as well.
            max_rows: most rows of a verify forward, the anchor's included.
            copies: look for copies.
            trees: whether branches may be fed: "auto" = once they have been shown to bring `TREE_GAIN` times as much.
                The target must support them.
            clock: seconds.
        """
        self._draft = draft
        self._ask = None if draft is None else as_asker(draft)
        self._memory = memory
        self._survival = Survival(memory.survival)
        self._max_rows = max_rows
        self._index = NgramIndex()
        self._copies = copies
        self._trees = trees
        self._num_candidates = NARROW if trees == "never" else BROAD
        self._clock = clock
        self._tokens, self._seconds = Average(), Average()
        self._rests = [_Rest() for _ in range(NUM_CLASSES)]
        self._watch = AcceptanceWatch(window=WATCHED)
        self._open: list[_Open] = []
        self._drafted: tuple[int, list[int]] | None = None  # position and tokens of the draft's own last chain
        self._fed: tuple[int, int, float] | None = None  # rows, depth, time when the proposal went out

    @property
    def max_proposal(self) -> int:
        """Most tokens one round feeds behind the anchor."""
        return self._max_rows - 1

    @property
    def reason(self) -> str | None:
        """Why the draft is not asked any more, in one sentence; None as long as it is."""
        return self._watch.reason

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        """Learn committed tokens, and what the round that gave them cost."""
        if self._fed is not None:
            rows, depth, started = self._fed
            self._memory.costs.saw_verify(rows, depth, self._clock() - started)
            self._tokens.add(len(token_ids))  # the anchor stands for the token that the target added itself
            self._fed = None
        self._index.extend(token_ids)
        if self._draft is not None and self.reason is None:
            self._draft.observe(token_ids, features)

    def propose(self, anchor: int, budget: int) -> Proposal:
        """The guesses that pay this round; none of them is a plain step."""
        depth = len(self._index.tokens)
        self._settle(anchor)
        costs = self._memory.costs
        price = self._price(depth)
        index = self._index if self._copies else None
        tail = [*self._index.tokens[1 - MAX_MATCH :], anchor]
        copied = plan = self._plan(Guesses(self._survival, index=index, tail=tail), budget, price)
        asked = False
        if self._ask is not None and self.reason is None:
            kind = _copy_class(copied)
            needed = price * costs.draft(depth)
            asked = self._rests[kind].asks(self._memory.expected_gain(kind), needed)
            if asked:
                started = self._clock()
                table = self._ask(anchor, budget, self._num_candidates)
                costs.saw_draft(depth, self._clock() - started)
                self._drafted = (depth + 1, [candidates[0] for candidates in table.ids])
                guesses = Guesses(self._survival, index=index, tail=tail, table=table, branching=self._num_candidates)
                plan = self._plan(guesses, budget, price)
                self._memory.add_gain(kind, plan.value - copied.value)
        if plan.nodes:
            self._open.append(_Open(depth + 1, 0, plan.nodes))
        return self._proposal(plan, depth, asked)

    def _proposal(self, plan: _Plan, depth: int, asked: bool) -> Proposal:
        fed = plan.nodes[: plan.num_fed]
        tokens = [node.path[-1] for node in fed]
        sources = [node.guess.source for node in fed if node.guess is not None]
        costs = self._memory.costs
        self._seconds.add(costs.verify(len(fed) + 1, depth) + (costs.draft(depth) if asked else 0.0))
        reason = " + ".join(sorted({COPY if source == COPY else DRAFT for source in sources})) or "plain"
        if asked and DRAFT not in reason:
            reason += ", draft asked"
        proposal = Proposal.tree(tokens, [node.parent for node in fed], sources=sources, reason=reason)
        self._fed = (len(fed) + 1, depth, self._clock())
        return proposal

    def _price(self, depth: int) -> float:
        """Tokens that a second brings: of this request's rounds so far, at least those of plain decoding."""
        plain = 1 / self._memory.costs.verify(1, depth)
        return max(plain, self._tokens.value / self._seconds.value) if self._seconds.value > 0 else plain

    def _plan(self, guesses: Guesses, budget: int, price: float) -> _Plan:
        """The best chain, or the best tree where trees have earned it."""
        line = self._memory.costs.line(len(self._index.tokens), self._max_rows)
        # What could not pay for a row even if rows were much cheaper than they are is not looked at.
        least = max(LEAST, 0.3 * price * (line[1] - line[0])) if len(line) > 1 else 1.0
        deepest = min(budget, self._max_rows - 1)
        price *= CAUTION
        chain = _best(grow_chain(guesses, max_depth=deepest, least=least), line, price)
        memory = self._memory
        weighed = self._trees == "auto" and (memory.tree.count < TREE_ROUNDS or memory.chain.count % 8 == 0)
        if self._trees == "never" or not (self._trees == "always" or weighed or memory.trees_win):
            memory.chain.count += 1
            return chain
        nodes = grow_tree(guesses, max_nodes=self._max_rows - 1, max_depth=deepest, least=least)
        tree = _best(nodes, line, price)
        memory.chain.add(chain.rate)
        memory.tree.add(tree.rate)
        return tree if (self._trees == "always" or memory.trees_win) and tree.value > chain.value else chain

    def _settle(self, anchor: int) -> None:
        """Count the guesses whose outcome the text up to the anchor tells, whether they were fed or not."""
        text = self._index.tokens
        length = len(text) + 1

        def said(position: int) -> int:
            return text[position] if position < length - 1 else anchor

        for guesses in self._open:
            while guesses.position < length:
                token, row = said(guesses.position), guesses.row
                guesses.row = -1
                for number, node in enumerate(guesses.nodes, start=1):
                    if node.parent == row and node.guess is not None:
                        hit = node.guess.token == token
                        self._survival.update(node.guess.key, node.guess.claim, hit)
                        if hit:
                            guesses.row = number
                if guesses.row < 0:
                    break
                guesses.position += 1
        self._open = [guesses for guesses in self._open if guesses.row >= 0]
        if self._drafted is not None:
            start, tokens = self._drafted
            known = [said(position) for position in range(start, min(start + len(tokens), length))]
            right = next((slot for slot, token in enumerate(known) if tokens[slot] != token), len(known))
            self._watch.add(right)
            self._drafted = None


def _best(nodes: list[Node], line: Sequence[float], price: float) -> _Plan:
    """How many of the nodes to feed; `line[r - 1]`: seconds of a forward of r rows."""
    phi, best, worth = 0.0, 0, 0.0
    rate = 1 / line[0]
    for number, node in enumerate(nodes, start=1):
        phi += node.survival
        value = phi - price * (line[number] - line[0])
        if value > worth:
            best, worth, rate = number, value, (1 + phi) / line[number]
    return _Plan(nodes, best, worth, rate)


@dataclass(slots=True)
class _Rest:
    """Whether the draft is asked in one class of rounds, with hysteresis, and when it is tried again if not."""

    asking: bool = True
    waited: int = 0
    until: int = FIRST_REST

    def asks(self, gain: float | None, needed: float) -> bool:
        """`gain`: tokens that asking will add, if known; `needed`: tokens that its time would bring otherwise."""
        if gain is not None:
            self.asking = gain > needed * (1 - HYSTERESIS if self.asking else 1 + HYSTERESIS)
        if self.asking:
            self.waited, self.until = 0, FIRST_REST
            return True
        self.waited += 1
        if self.waited < self.until:
            return False
        self.waited, self.until = 0, min(2 * self.until, LONGEST_REST)
        return True


def _copy_class(plan: _Plan) -> int:
    """Class of a round by the chance of its best copy; 0 = nothing to copy."""
    return 0 if not plan.nodes else bisect_right(COPY_STEPS, plan.nodes[0].survival)


def as_asker(draft: Drafter) -> Callable[[int, int, int], CandidateTable]:
    """How to get a candidate table out of a drafter; one that only proposes chains gives one candidate per slot."""
    own: Callable[[int, int, int], CandidateTable] | None = getattr(draft, "candidates", None)
    if own is not None:
        return lambda anchor, budget, count: own(anchor, min(budget, draft.max_proposal), count)

    def from_chain(anchor: int, budget: int, count: int) -> CandidateTable:
        proposal = draft.propose(anchor, min(budget, draft.max_proposal))
        assert proposal.parents is None, "a drafter of trees must offer candidates"
        claims = proposal.log_probs or (UNKNOWN_CLAIM,) * len(proposal.tokens)
        return CandidateTable([[token] for token in proposal.tokens], [[claim] for claim in claims])

    return from_chain
