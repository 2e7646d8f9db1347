"""How many guesses to feed, and whether to ask the draft at all: a drafter that decides by measured cost.

Each round it gathers guesses (copies of earlier text, which cost nothing, and the draft's candidates, which cost a
forward), estimates how likely each is to be accepted (`core/survival.py`), and feeds as many as pay
(`core/plans.py`):

    choose N to maximise  Phi(N) - price * (C(N + 1) - C(1))          Phi = sum of the survivals of the N nodes fed

C is the measured cost of a forward by its rows (`core/cost.py`), and the price of a second is the number of tokens a
second brings on average, times a margin of caution. For equal rounds that maximises tokens per second, as the ratio
rule of arXiv:2606.01813 does; where rounds differ it spends time where it brings most. N may be 0, a plain step. The
draft is asked when what it has lately added, in tokens, exceeds the price of its forward; while it rests it is tried
again at intervals that grow with what a try is expected to lose.

And a round may not lose more than the request's ledger allows (`core/ledger.py`).

Nothing here can change a text. All guesses are point masses fixed before the target's draw, and how many of them are
fed is a function of the history, so any choice is lossless at any temperature, and in the bit-exact width class it
changes no bit; in mode "fast" guesses may also be drawn, which keeps the target's distribution (`core/sampled.py`).
Wrong costs or estimates only make decoding slower.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from dflash.core.bigrams import Bigrams
from dflash.core.guesses import COPY, DRAFT, Guesses, Node
from dflash.core.ledger import Ledger
from dflash.core.memory import TREE_ROUNDS, Average, Memory
from dflash.core.ngram import MAX_MATCH, NgramIndex
from dflash.core.parking import AcceptanceWatch
from dflash.core.plans import Plan, best_plan, reconsidered
from dflash.core.protocols import Drafter
from dflash.core.sampled import NUM_DRAWN, Drawing, DrawnPlan
from dflash.core.survival import Survival
from dflash.core.tree import grow_chain, grow_tree
from dflash.types import Acceptance, CandidateTable, Clock, Proposal

WATCHED = 150
"""Drafts that the alarm for broken drafts looks back on: more than where drafting is fixed, since a weak draft is asked
seldom here anyway and must not be stopped by bad luck."""
LEAST = 0.005
"""Guesses that are accepted less often are never fed."""
NARROW, BROAD = 2, 4
"""Candidates per slot that the draft is asked for: chains, trees."""
WEIGHED_EVERY = 8
"""Rounds after which trees are weighed again where chains are fed."""
UNKNOWN_CLAIM = math.log(0.7)
"""Of a drafter that gives no probabilities: where the estimate starts."""


class TableDrafter(Drafter, Protocol):
    """A drafter that can say what it thinks of each slot instead of settling on tokens."""

    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        """The `count` best candidates of at most `budget` slots behind the anchor."""
        ...


@dataclass(slots=True)
class _Open:
    """Guesses whose outcome is not known yet: the next token's position, and the row it would be a child of."""

    position: int
    row: int
    nodes: list[Node]


@dataclass(frozen=True, slots=True)
class _Fed:
    """The proposal that is out."""

    rows: int
    depth: int
    asked_draft: bool
    started: float
    asked: Sequence[Sequence[int]]
    table: CandidateTable | None


class AdaptiveDrafter:
    """Implements `dflash.core.protocols.Drafter` over copies and at most one draft."""

    def __init__(
        self,
        draft: Drafter | None,
        memory: Memory,
        *,
        max_rows: int,
        copies: bool = True,
        bigrams: Bigrams | None = None,
        trees: Literal["never", "auto", "always"] = "never",
        temperature: float = 0.0,
        generator: np.random.Generator | None = None,
        clock: Clock = time.perf_counter,
        steady: bool = False,
    ) -> None:
        """
        Args:
            draft: a fresh session; None = copies only.
            memory: of the engine; learns as well.
            max_rows: most rows of a verify forward, the anchor's included.
            copies: look for copies.
            bigrams: what the draft's candidates say about one another; None = nothing.
            trees: whether branches may be fed: "auto" = once they have been shown to bring `TREE_GAIN` times as much.
                The target must support them.
            temperature: of the request's sampling.
            generator: draws from the draft's distribution where that is better than its first choices
                (`core/sampled.py`); None = first choices only, which keep texts the same for a seed.
            clock: seconds.
            steady: rounds teach nothing about costs.
        """
        self._draft = draft
        self._steady = steady
        self._ask = None if draft is None else as_asker(draft)
        self._costs = memory.costs
        self._lessons = memory.at(temperature)
        self._survival = Survival(self._lessons.survival)
        self._ledger = Ledger()
        self._samples = temperature > 0
        self._max_rows = max_rows
        self._index = NgramIndex()
        self._copies = copies
        self._bigrams = bigrams
        self._trees = trees
        self._num_candidates = NARROW if trees == "never" else BROAD
        self._drawing = None if generator is None else Drawing(self._lessons.agreements, self._survival, generator)
        self._num_trees = 0
        self._weighs_trees = False  # in this round
        self._weighed: tuple[Plan, Plan] | None = None  # its best chain and its best tree
        self._clock = clock
        self._tokens, self._seconds = Average(), Average()
        self._watch = AcceptanceWatch(window=WATCHED)
        self._open: list[_Open] = []
        self._chances: dict[int, dict[int, float]] = {}  # position -> the target's probabilities there
        self._drafted: tuple[int, list[int]] | None = None  # position and tokens of the draft's own last chain
        self._fed: _Fed | None = None

    @property
    def max_proposal(self) -> int:
        """Most tokens one round feeds behind the anchor."""
        return self._max_rows - 1

    @property
    def reason(self) -> str | None:
        """Why the draft is not asked any more, in one sentence; None as long as it is."""
        return self._watch.reason

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen beyond chains of first choices, and why, a sentence each."""
        notes = []
        if self._num_trees and self._trees == "always":
            notes.append(f"trees in {self._num_trees} rounds, as mode fast allows")
        elif self._num_trees:
            gain = self._lessons.tree.value / self._lessons.chain.value
            notes.append(f"trees in {self._num_trees} rounds: expected to bring {gain:.2f} times the speed of chains")
        if self._drawing is not None and self._drawing.note is not None:
            notes.append(self._drawing.note)
        return tuple(notes)

    def learn(self, acceptance: Acceptance) -> None:
        """What the target thought of the guesses, where tokens are drawn; comes before `observe`."""
        fed = self._fed
        if fed is None:
            return
        for step, (row, chances) in enumerate(zip(acceptance.path, acceptance.chances, strict=True)):
            known = self._chances[fed.depth + 1 + step] = dict(zip(fed.asked[row], chances, strict=True))
            if self._drawing is not None and fed.table is not None and step < len(fed.table.ids):
                self._drawing.learn(step, fed.table, known)

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        """Learn committed tokens, and what the round that gave them cost."""
        fed, costs = self._fed, self._costs
        if fed is not None:
            if not self._steady:
                costs.saw_verify(fed.rows, fed.depth, self._clock() - fed.started)
            drafting = costs.draft(fed.depth) if fed.asked_draft else 0.0
            self._tokens.add(len(token_ids))  # the anchor stands for the token that the target added itself
            self._seconds.add(costs.verify(fed.rows, fed.depth) + drafting)
            steps = costs.steps(fed.rows, fed.depth) + drafting / costs.verify(1, fed.depth)
            self._ledger.book(len(token_ids), steps)
            self._fed = None
        self._index.extend(token_ids)
        if self._draft is not None and self.reason is None:
            self._draft.observe(token_ids, features)

    def propose(self, anchor: int, budget: int) -> Proposal:
        """The guesses that pay this round; none of them is a plain step."""
        depth = len(self._index.tokens)
        self._settle(anchor)
        self._weighs_trees = self._trees_are_due()
        price = self._price(depth)
        index = self._index if self._copies else None
        tail = [*self._index.tokens[1 - MAX_MATCH :], anchor]
        plan = self._plan(Guesses(self._survival, index=index, tail=tail), budget, price)
        table = self._ask_draft(plan, anchor, budget, price)
        drawn = None
        if table is not None:
            fitted = table if self._bigrams is None else self._bigrams.condition(table)
            guesses = Guesses(self._survival, index=index, tail=tail, table=fitted, branching=self._num_candidates)
            spent, line = self._costs.draft(depth), self._costs.line(depth, self._max_rows)
            both = self._plan(guesses, budget, price, spent=spent)
            if self._drawing is not None:
                longest = min(budget, self._max_rows - 1)
                drawn = self._drawing.plan(table, longest, line, price, self._longest(line, spent))
                drawn = drawn if drawn is not None and drawn.value > both.value else None
            value = both.value if drawn is None else drawn.value
            self._lessons.add_gain(plan.copy_class, value - reconsidered(plan, guesses, line, price))
            plan = both
        self._weigh_trees(0.0 if table is None else self._costs.draft(depth))
        if plan.nodes:
            self._open.append(_Open(depth + 1, 0, plan.nodes))
        return self._proposal(plan, depth, table, drawn)

    def _ask_draft(self, copied: Plan, anchor: int, budget: int, price: float) -> CandidateTable | None:
        """The draft's candidates, if they are expected to pay for its forward or it is due to be tried again, and if
        its time may be lost."""
        if self._ask is None or self.reason is not None:
            return None
        depth, costs, kind = len(self._index.tokens), self._costs, copied.copy_class
        seconds = costs.draft(depth)
        rest = self._lessons.rests[kind]
        wanted = rest.asks(self._lessons.expected_gain(kind), price * seconds)
        if not wanted or seconds > self._ledger.limit * costs.verify(1, depth):
            return None
        rest.asked()
        started = self._clock()
        count = self._num_candidates if self._bigrams is None else BROAD
        count = count if self._drawing is None else max(count, NUM_DRAWN)
        table = self._ask(anchor, budget, count)
        if not self._steady:
            costs.saw_draft(depth, self._clock() - started)
        self._drafted = (depth + 1, [candidates[0] for candidates in table.ids])
        return table

    def _proposal(self, plan: Plan, depth: int, table: CandidateTable | None, drawn: DrawnPlan | None) -> Proposal:
        """Feed the plan, or a chain that is drawn from the draft in its place."""
        fed = plan.nodes[: plan.num_fed] if drawn is None else []
        sources = [node.guess.source for node in fed if node.guess is not None]
        reason = " + ".join(sorted({COPY if source == COPY else DRAFT for source in sources})) or "plain"
        if drawn is not None:
            reason = f"{DRAFT}, drawn"
        elif table is not None and DRAFT not in reason:
            reason += ", draft asked"
        if drawn is not None and self._drawing is not None:
            proposal = self._drawing.draw(drawn, reason=reason)
        else:
            tokens, parents = [node.path[-1] for node in fed], [node.parent for node in fed]
            proposal = Proposal.tree(tokens, parents, sources=sources, reason=reason)
        if self._samples:
            proposal = replace(proposal, asked=self._questions(proposal, plan, table))
        self._num_trees += proposal.parents is not None
        self._fed = _Fed(len(proposal.tokens) + 1, depth, table is not None, self._clock(), proposal.asked, table)
        return proposal

    def _questions(self, proposal: Proposal, plan: Plan, table: CandidateTable | None) -> tuple[tuple[int, ...], ...]:
        """Per row the tokens that are guessed behind it, whether they are fed or not."""
        rows = proposal.depths()
        found: list[dict[int, None]] = [{} for _ in rows]
        for node in plan.nodes:
            for row, depth in enumerate(rows):
                if depth == len(node.path) - 1:
                    found[row][node.path[-1]] = None
        if self._drawing is not None and table is not None:
            for row, depth in enumerate(rows):
                if depth < len(table.ids):
                    found[row].update(dict.fromkeys(table.ids[depth]))
        return tuple(map(tuple, found))

    def _price(self, depth: int) -> float:
        """Tokens that a second brings: of this request's rounds so far, at least those of plain decoding."""
        plain = 1 / self._costs.verify(1, depth)
        return max(plain, self._tokens.value / self._seconds.value) if self._seconds.value > 0 else plain

    def _plan(self, guesses: Guesses, budget: int, price: float, *, spent: float = 0.0) -> Plan:
        """The best chain, or the best tree where trees have earned it. `spent`: seconds of this round so far."""
        line = self._costs.line(len(self._index.tokens), self._max_rows)
        # What could not pay for a row even if rows were much cheaper than they are is not looked at.
        least = max(LEAST, 0.3 * price * (line[1] - line[0])) if len(line) > 1 else 1.0
        deepest = min(budget, self._max_rows - 1)
        longest = self._longest(line, spent)
        chain = best_plan(grow_chain(guesses, max_depth=deepest, least=least), line, price, longest)
        if not self._weighs_trees:
            return chain
        nodes = grow_tree(guesses, max_nodes=self._max_rows - 1, max_depth=deepest, least=least)
        tree = best_plan(nodes, line, price, longest)
        self._weighed = chain, tree
        allowed = self._trees == "always" or self._lessons.judge_trees()
        return tree if allowed and tree.value > chain.value else chain

    def _trees_are_due(self) -> bool:
        """Whether trees are grown in this round: where they are fed, and now and then to see what they would bring."""
        lessons = self._lessons
        lessons.num_rounds += 1
        due = lessons.tree.count < TREE_ROUNDS or lessons.num_rounds % WEIGHED_EVERY == 0
        return self._trees == "always" or (self._trees == "auto" and (due or lessons.judge_trees()))

    def _weigh_trees(self, drafting: float) -> None:
        """Count what the best chain and the best tree of this round's guesses would bring; `drafting`: seconds that
        both cost alike."""
        if self._weighed is not None:
            for rate, plan in zip((self._lessons.chain, self._lessons.tree), self._weighed, strict=True):
                rate.add(plan.tokens, plan.seconds + drafting)
        self._weighed = None

    def _longest(self, line: Sequence[float], spent: float) -> float:
        """Seconds that a verify forward may take behind `spent` seconds of drafting, should nothing be accepted."""
        return line[0] * (1 + self._ledger.limit) - spent

    def _settle(self, anchor: int) -> None:
        """Count the guesses whose outcome the text up to the anchor tells, whether they were fed or not."""
        text = self._index.tokens
        length = len(text) + 1

        def said(position: int) -> int:
            return text[position] if position < length - 1 else anchor

        for guesses in self._open:
            while guesses.position < length:
                token, row = said(guesses.position), guesses.row
                chances = self._chances.get(guesses.position, {})
                guesses.row = -1
                for number, node in enumerate(guesses.nodes, start=1):
                    if node.parent == row and node.guess is not None:
                        hit = node.guess.token == token
                        share = chances.get(node.guess.token, float(hit))
                        self._survival.update(node.guess.key, node.guess.claim, share)
                        if hit:
                            guesses.row = number
                if guesses.row < 0:
                    break
                guesses.position += 1
        self._open = [guesses for guesses in self._open if guesses.row >= 0]
        self._chances.clear()  # of positions that are settled now
        if self._drafted is not None:
            start, tokens = self._drafted
            known = [said(position) for position in range(start, min(start + len(tokens), length))]
            right = next((slot for slot, token in enumerate(known) if tokens[slot] != token), len(known))
            self._watch.add(right)
            self._drafted = None


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
