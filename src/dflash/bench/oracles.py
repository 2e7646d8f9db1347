"""What a rule of drafting could reach at most on a recorded answer, and where a replayed one lost time against that.

The hindsight oracle knows the text. Per round it feeds exactly the guesses that will be accepted, asks the draft only
where that pays, and may take each token of a chain from the draft or from the copies. No rule can beat it with these
guesses; the best rule that knows only probabilities lies between it and the best fixed width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dflash.bench.replay import MAX_ROWS, Costs, Replayed, replay
from dflash.bench.traces import Trace
from dflash.core.guesses import COPY, DRAFT
from dflash.core.ngram import MAX_MATCH, NgramIndex
from dflash.types import Drafting


@dataclass(frozen=True)
class Reach:
    """Guesses behind one anchor that are right, one after the other."""

    copies: int
    """By the best copies alone."""
    draft: int
    """By the draft's first choices alone."""
    either: int
    """If each token may come from either."""


def reaches(trace: Trace, *, longest: int = MAX_ROWS - 1) -> list[Reach]:
    """Of every answer token but the last, for chains of at most `longest` guesses."""
    index = NgramIndex()
    index.extend(trace.prompt_ids)
    answer, found = trace.answer_ids, []
    for at, table in enumerate(trace.tables):
        left = answer[at + 1 :]
        if not trace.stopped:
            left = left[:-1]  # at the limit, the last token of a round is the target's own
        left = left[:longest]
        first = [ids[0] for ids in table.ids]
        tail = [*index.tokens[1 - MAX_MATCH :], answer[at]]
        draft = next((slot for slot, pair in enumerate(zip(first, left, strict=False)) if pair[0] != pair[1]), -1)
        found.append(
            Reach(
                copies=_run(left, index, tail, []),
                draft=min(len(first), len(left)) if draft < 0 else draft,
                either=_run(left, index, tail, first),
            )
        )
        index.extend(answer[at : at + 1])
    return found


def _run(left: Sequence[int], index: NgramIndex, tail: Sequence[int], first: Sequence[int]) -> int:
    """Tokens of `left` in a row that the best copy behind the text or the draft's first choices say."""
    for count, token in enumerate(left):
        copies = index.copies([*tail, *left[:count]][-MAX_MATCH:])
        copied = bool(copies) and copies[0].token == token
        if not copied and not (count < len(first) and first[count] == token):
            return count
    return len(left)


def hindsight(
    trace: Trace, costs: Costs, *, longest: int = MAX_ROWS - 1, use_draft: bool = True, use_copies: bool = True
) -> list[float]:
    """[a]: least seconds from anchor `a` to the end of the answer; the last entry is 0."""
    start = len(trace.prompt_ids)
    found = reaches(trace, longest=longest)
    left = [0.0] * len(trace.answer_ids)
    for at in reversed(range(len(found))):
        reach, depth = found[at], start + at
        options = [(0, 0.0)]
        if use_copies:
            options += [(count, 0.0) for count in range(1, reach.copies + 1)]
        if use_draft:
            most = reach.either if use_copies else reach.draft
            options += [(count, costs.draft) for count in range(1, most + 1)]
        left[at] = min(
            costs.verify.at(1 + count, depth) + spent + left[min(at + 1 + count, len(left) - 1)]
            for count, spent in options
        )
    return left


def best_width(traces: Iterable[Trace], costs: Costs, widths: Iterable[int]) -> tuple[int, float]:
    """(rows, seconds) of the best fixed width over all answers together, the draft asked in every round."""
    answers = list(traces)
    seconds = {
        width: sum(replay(trace, costs, Drafting(fixed=True, width=width)).seconds for trace in answers)
        for width in widths
    }
    best = min(seconds, key=lambda width: seconds[width])
    return best, seconds[best]


def losses(replayed: Replayed, costs: Costs, *, longest: int = MAX_ROWS - 1) -> Mapping[str, float]:
    """Seconds over the hindsight oracle, by what they were lost with; they add up to the whole difference.

    "rows": rows fed beyond the accepted ones. "asked": drafts of which nothing was accepted. "missed": everything else,
    that is what guesses that were right and not fed would have saved; a tree that beats all chains makes it smaller.
    """
    trace = replayed.trace
    left = hindsight(trace, costs, longest=longest)
    found = {"rows": 0.0, "asked": 0.0, "missed": 0.0}
    at, start = 0, len(trace.prompt_ids)
    for step in replayed.rounds:
        depth = start + at
        asked = at in replayed.asked
        seconds = costs.verify.at(1 + step.num_proposed, depth) + (costs.draft if asked else 0.0)
        after = min(at + len(step.tokens), len(left) - 1)
        lost = seconds + left[after] - left[at]
        rows = seconds - (costs.draft if asked else 0.0) - costs.verify.at(1 + step.num_accepted, depth)
        sources = step.sources or (DRAFT,) * step.num_accepted  # fixed drafts do not say it
        vain = costs.draft if asked and all(source == COPY for source in sources) else 0.0
        found["rows"] += rows
        found["asked"] += vain
        found["missed"] += lost - rows - vain
        at = after
    return found
