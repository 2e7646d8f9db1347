"""Replay of recorded answers on a clock that costs drive: the real drafter in the real loop, without models.

The drafter is the one that an engine would make of the same choices (`core/drafting.py`); what it asks of draft and
target is read from a trace (`bench/traces.py`), and each forward moves the clock by what a curve says. Texts cannot
come out otherwise than recorded, so that the seconds of two rules may be compared answer by answer. Drawn proposals
would change the text and cannot be replayed; mode "fast" is replayed without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash.bench.traces import Trace
from dflash.core.bigrams import Bigrams
from dflash.core.cost import CostCurve, CostTracker
from dflash.core.drafting import make_session
from dflash.core.loop import speculative_rounds
from dflash.core.memory import Memory
from dflash.core.stopping import StopRule
from dflash.core.tree import walk
from dflash.types import Acceptance, CandidateTable, Drafting, Proposal, Round, SamplingParams, Stats, Verdict

MAX_ROWS = 16
"""Rows of the widest forward, as an engine on a CPU checks them."""
_ROOM = 1000


@dataclass(frozen=True)
class Costs:
    """What forwards take, in plain steps."""

    verify: CostCurve
    draft: float

    @classmethod
    def through(cls, points: Mapping[int, float], draft: float) -> Costs:
        """`points`: verify forwards by rows; linear between and beyond them. 1 row takes 1.0 = a plain step."""
        rows = tuple(sorted(points))
        return cls(CostCurve(rows, (0,), (tuple(points[width] for width in rows),)), draft)

    def memory(self) -> Memory:
        """Of an engine that has measured these costs and decoded nothing yet."""
        return Memory(CostTracker(self.verify, CostCurve((1,), (0,), ((self.draft,),))))


class SimulatedTime:
    """Seconds that only forwards add to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TracedDraft:
    """A draft that says what was recorded; a forward takes `seconds`."""

    def __init__(self, trace: Trace, clock: SimulatedTime, seconds: float) -> None:
        self._trace, self._clock, self._seconds = trace, clock, seconds
        self._num_seen = 0
        self.asked: list[int] = []
        """Places in the answer of the anchors it was asked behind."""

    @property
    def max_proposal(self) -> int:
        """Slots of the recorded tables."""
        return max((len(table.ids) for table in self._trace.tables), default=1)

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        """Count, to know where the anchor is."""
        self._num_seen += len(token_ids)

    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        """The recorded table of the anchor, cut."""
        self._clock.now += self._seconds
        at = self._num_seen - len(self._trace.prompt_ids)  # the anchor's place in the answer
        assert self._trace.answer_ids[at] == anchor, "the anchor stands where it was recorded"
        self.asked.append(at)
        table, slots = self._trace.tables[at], slice(budget)
        return CandidateTable(
            [ids[:count] for ids in table.ids[slots]],
            [scores[:count] for scores in table.log_probs[slots]],
            None
            if table.transitions is None
            else [[row[:count] for row in rows[:count]] for rows in table.transitions[: max(budget - 1, 0)]],
        )

    def propose(self, anchor: int, budget: int) -> Proposal:
        """The first choices, as a fixed draft feeds them."""
        table = self.candidates(anchor, budget, 1)
        return Proposal(tuple(ids[0] for ids in table.ids))


class _TracedTarget:
    """A target that computes nothing; a forward takes what the curve says."""

    supports_trees = True

    def __init__(self, trace: Trace, clock: SimulatedTime, verify: CostCurve) -> None:
        self._clock, self._verify, self._depth = clock, verify, len(trace.prompt_ids)
        self.max_length = self._depth + len(trace.answer_ids) + _ROOM

    def prefill(self, prompt_ids: Sequence[int]) -> Verdict:
        return Verdict(None)

    def verify(self, anchor: int, proposal: Proposal) -> Verdict:
        self._clock.now += self._verify.at(1 + len(proposal.tokens), self._depth)
        return Verdict(None)

    def commit(self, path: Sequence[int]) -> None:
        self._depth += len(path)


class _TracedAcceptor:
    """The recorded text decides."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._at = trace, 0

    def accept(self, proposal: Proposal, verdict: Verdict) -> Acceptance:
        answer, at = self._trace.answer_ids, self._at

        def said(row: int, depth: int) -> int:
            return answer[at + depth] if at + depth < len(answer) else -1

        acceptance = walk(proposal, said)
        self._at += len(acceptance.path)
        if not proposal.asked or self._trace.temperature == 0:
            return acceptance
        chances = [
            tuple(self._chance(at + step, token) for token in proposal.asked[row])
            for step, row in enumerate(acceptance.path)
        ]
        return Acceptance(acceptance.path, acceptance.next_token, tuple(chances))

    def _chance(self, position: int, token: int) -> float:
        """Behind the answer's end nothing is known; guesses there are never counted."""
        chances = self._trace.chances
        return chances[position].get(token, 0.0) if position < len(chances) else 0.0


@dataclass(frozen=True)
class _Shared:
    """One draft as `make_session` takes it."""

    draft: TracedDraft

    def session(self) -> TracedDraft:
        return self.draft


@dataclass(frozen=True)
class Replayed:
    """One answer."""

    trace: Trace
    rounds: tuple[Round, ...]
    """Behind the prefill."""
    asked: tuple[int, ...]
    """Places in the answer of the anchors that the draft was asked behind."""
    seconds: float
    """In plain steps, as long as the text is short."""
    plain_seconds: float
    """What plain decoding takes."""

    @property
    def speed_up(self) -> float:
        """Over plain decoding."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0  # an answer of one token has no rounds

    @property
    def stats(self) -> Stats:
        """Figures of the rounds."""
        stats = Stats()
        for step in self.rounds:
            stats.add(step)
        return stats


def replay(
    trace: Trace,
    costs: Costs,
    drafting: Drafting,
    memory: Memory | None = None,
    *,
    bigrams: Bigrams | None = None,
    max_rows: int = MAX_ROWS,
) -> Replayed:
    """Decode one answer again.

    Args:
        drafting: how the request drafts.
        memory: of the engine, which learns; None = one that has measured the costs and decoded nothing yet.
        bigrams: counted beside the draft.
        max_rows: most rows of a verify forward.
    """
    clock = SimulatedTime()
    draft = TracedDraft(trace, clock, costs.draft)
    drafter = make_session(
        _Shared(draft),
        dataclasses.replace(drafting, draws=False),
        memory or costs.memory(),
        max_rows=max_rows,
        supports_trees=True,
        bigrams=bigrams,
        params=SamplingParams(temperature=trace.temperature),
        clock=clock,
    )
    answer = trace.answer_ids
    rounds = list(
        speculative_rounds(
            _TracedTarget(trace, clock, costs.verify),
            drafter,
            _TracedAcceptor(trace),
            StopRule({answer[-1]} if trace.stopped else ()),
            trace.prompt_ids,
            # An answer that ended by itself had room behind it.
            max_new_tokens=len(answer) + (_ROOM if trace.stopped else 0),
            width=drafting.width,
            clock=clock,
        )
    )
    text = tuple(token for step in rounds for token in step.tokens)
    assert text == answer, "a rule of drafting has changed the text"
    start = len(trace.prompt_ids)
    plain = sum(costs.verify.at(1, start + step) for step in range(len(answer) - 1))
    return Replayed(trace, tuple(rounds[1:]), tuple(draft.asked), clock.now, plain)


def overall(replayed: Sequence[Replayed]) -> float:
    """Speed-up over plain decoding of several answers together."""
    return sum(one.plain_seconds for one in replayed) / sum(one.seconds for one in replayed)
