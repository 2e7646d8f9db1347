"""Greedy texts with and without the draft: where they part, whether that may be, and whether the target says them.

Two questions per prompt. Are the tokens those of plain decoding? And is every token one that the bare model (`Oracle`)
would say? The second finds faults that both forms of decoding share. Framework-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from dflash.audit.oracle import Oracle
from dflash.core.engine import Engine
from dflash.core.textshare import TextShare, text_share
from dflash.types import Drafting, SamplingParams

Verdict = Literal["near-tie", "fault"]

WHOLE_BLOCKS = Drafting(fixed=True)
"""The draft's whole block in every round: drafting by measured cost could leave a draft out that does not pay here, and
an audit would compare plain decoding with itself."""


@dataclass(frozen=True)
class Difference:
    """The first place where two texts part."""

    position: int
    """Index in the output, from 0."""
    plain: str
    drafted: str
    """What either said there ('' if it had ended)."""
    margin: float
    """Best minus second-best logit of the target there."""
    distance: float
    """Best logit minus the logit of the worse of the two tokens said."""
    tolerance: float
    """Distance that rounding may turn round on this machine, in this dtype."""
    verdict: Verdict


@dataclass(frozen=True)
class Stranger:
    """A token that the bare model would not say, by more than rounding explains."""

    position: int
    token: str
    distance: float
    """Best logit of the bare model minus the logit of that token."""
    tolerance: float


@dataclass(frozen=True)
class TextAudit:
    """One prompt's greedy answers."""

    prompt: str
    num_tokens: int
    difference: Difference | None
    """Draft against plain decoding; None: the same tokens."""
    stranger: Stranger | None
    """First token of the draft's text that the bare model would not say; None: there is none."""
    share: TextShare
    acceptance_length: float

    @property
    def passed(self) -> bool:
        """Nothing but near-ties."""
        return self.stranger is None and (self.difference is None or self.difference.verdict == "near-tie")


def audit_text(
    engine: Engine, oracle: Oracle, name: str, prompt_ids: Sequence[int], max_new_tokens: int, *, must_agree: bool
) -> TextAudit:
    """Answer one prompt both ways. `must_agree`: equality is promised here, so that no tie excuses a difference."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    plain = engine.generate(prompt_ids=prompt_ids, params=params, use_draft=False)
    drafted = engine.generate(prompt_ids=prompt_ids, params=params, drafting=WHOLE_BLOCKS)
    ids = [*prompt_ids, *drafted.token_ids]
    num_rows = len(drafted.token_ids)
    rows = oracle.logits(ids[:-1], num_rows)
    tolerance = oracle.tolerance(ids[:-1], num_rows)
    position = first_difference(plain.token_ids, drafted.token_ids)
    difference = None
    if position is not None:
        # Up to there both texts are one, so the rows of the draft's text answer for both; one row more if it had ended.
        row = rows[position] if position < num_rows else oracle.logits(ids, 1)[0]
        said = [ids[position] for ids in (plain.token_ids, drafted.token_ids) if position < len(ids)]
        second, best = sorted(row)[-2:]
        distance = float(max(best - row[token] for token in said))
        is_tie = distance <= tolerance and len(said) == 2 and not must_agree
        difference = Difference(
            position=position,
            plain=engine.decode(plain.token_ids[position : position + 1]),
            drafted=engine.decode(drafted.token_ids[position : position + 1]),
            margin=float(best - second),
            distance=distance,
            tolerance=tolerance,
            verdict="near-tie" if is_tie else "fault",
        )
    stranger = None
    for index, (token, row) in enumerate(zip(drafted.token_ids, rows, strict=True)):
        distance = float(row.max() - row[token])
        if distance > tolerance:
            stranger = Stranger(index, engine.decode([token]), distance, tolerance)
            break
    share = text_share(prompt_ids, drafted.token_ids)
    return TextAudit(name, num_rows, difference, stranger, share, drafted.stats.acceptance_length)


def same_seed_same_text(engine: Engine, prompt_ids: Sequence[int], max_new_tokens: int) -> int | None:
    """First index at which sampled texts with and without the draft part, for one seed; None if they do not."""
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.8, top_p=0.95, seed=1, ignore_eos=True)
    plain = engine.generate(prompt_ids=prompt_ids, params=params, use_draft=False)
    drafted = engine.generate(prompt_ids=prompt_ids, params=params, drafting=WHOLE_BLOCKS)
    return first_difference(plain.token_ids, drafted.token_ids)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first index at which two sequences differ or one has ended; None if they are equal."""
    return next((at for at, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)
