"""Greedy texts with and without the draft: where they part, whether that may be, and whether the target says them.

Two questions per prompt. Are the tokens those of plain decoding? And is every token one that the bare model (`Oracle`)
would say? The second finds faults that both forms of decoding share. Framework-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from dflash.audit.forms import Form, num_branch_rows
from dflash.audit.oracle import Oracle
from dflash.core.engine import Engine
from dflash.core.reference import FloatArray
from dflash.core.textshare import TextShare, text_share
from dflash.types import Result, SamplingParams

Ruling = Literal["near-tie", "fault"]


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
    verdict: Ruling


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
    """One prompt's greedy answer, drafted in one form."""

    prompt: str
    form: str
    """Name of the way to draft."""
    num_tokens: int
    difference: Difference | None
    """Draft against plain decoding; None: the same tokens."""
    stranger: Stranger | None
    """First token of the draft's text that the bare model would not say; None: there is none."""
    share: TextShare
    acceptance_length: float
    num_guesses: int
    """Draft tokens that were fed."""
    num_branch_rows: int
    """Those of them that were alternatives to others: without any, equality is promised as for chains."""
    num_copied: int
    """Accepted tokens that came from copies of earlier text."""

    @property
    def passed(self) -> bool:
        """Nothing but near-ties."""
        return self.stranger is None and (self.difference is None or self.difference.verdict == "near-tie")


def audit_texts(
    engine: Engine,
    oracle: Oracle,
    name: str,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    forms: Sequence[Form],
    *,
    must_agree: bool,
) -> list[TextAudit]:
    """Answer one prompt without a draft and in every form. `must_agree`: equality is promised here for chains, so that
    no tie excuses a difference."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    plain = engine.generate(prompt_ids=prompt_ids, params=params, use_draft=False)
    known: dict[tuple[int, ...], tuple[FloatArray, float]] = {}  # most forms give the same text
    found = []
    for form in forms:
        drafted = form.engine.generate(prompt_ids=prompt_ids, params=params, drafting=form.drafting)
        key = tuple(drafted.token_ids)
        if key not in known:
            ids, num_rows = [*prompt_ids, *key[:-1]], len(key)
            known[key] = oracle.logits(ids, num_rows), oracle.tolerance(ids, num_rows)
        promised = must_agree and num_branch_rows(drafted.stats) == 0
        judge = _Judge(engine, oracle, prompt_ids, *known[key], promised)
        found.append(judge.audit(name, form.name, plain, drafted))
    return found


@dataclass(frozen=True)
class _Judge:
    """What is needed to judge one drafted text."""

    engine: Engine
    oracle: Oracle
    prompt_ids: Sequence[int]
    rows: FloatArray  # [tokens, V], what the bare model says at each token of the drafted text
    tolerance: float
    must_agree: bool

    def audit(self, name: str, form: str, plain: Result, drafted: Result) -> TextAudit:
        """Compare a drafted text with the plain one and with the bare model."""
        stats = drafted.stats
        return TextAudit(
            prompt=name,
            form=form,
            num_tokens=len(drafted.token_ids),
            difference=self._difference(plain.token_ids, drafted.token_ids),
            stranger=self._stranger(drafted.token_ids),
            share=text_share(self.prompt_ids, drafted.token_ids),
            acceptance_length=stats.acceptance_length,
            num_guesses=stats.num_proposed,
            num_branch_rows=num_branch_rows(stats),
            num_copied=stats.accepted_by_source.get("copy", 0) + stats.accepted_by_source.get("both", 0),
        )

    def _difference(self, plain: Sequence[int], drafted: Sequence[int]) -> Difference | None:
        position = first_difference(plain, drafted)
        if position is None:
            return None
        # Up to there both texts are one, so the rows of the draft's text answer for both; one row more if it had ended.
        inside = position < len(drafted)
        row = self.rows[position] if inside else self.oracle.logits([*self.prompt_ids, *drafted], 1)[0]
        said = [ids[position] for ids in (plain, drafted) if position < len(ids)]
        second, best = sorted(row)[-2:]
        distance = float(max(best - row[token] for token in said))
        is_tie = distance <= self.tolerance and len(said) == 2 and not self.must_agree
        return Difference(
            position=position,
            plain=self.engine.decode(plain[position : position + 1]),
            drafted=self.engine.decode(drafted[position : position + 1]),
            margin=float(best - second),
            distance=distance,
            tolerance=self.tolerance,
            verdict="near-tie" if is_tie else "fault",
        )

    def _stranger(self, drafted: Sequence[int]) -> Stranger | None:
        for index, (token, row) in enumerate(zip(drafted, self.rows, strict=True)):
            distance = float(row.max() - row[token])
            if distance > self.tolerance:
                return Stranger(index, self.engine.decode([token]), distance, self.tolerance)
        return None


def same_seed_same_text(
    engine: Engine, prompt_ids: Sequence[int], max_new_tokens: int, forms: Sequence[Form]
) -> int | None:
    """First index at which sampled texts with and without the draft part, for one seed and any form that feeds chains
    only; None if they do not."""
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.8, top_p=0.95, seed=1, ignore_eos=True)
    plain = engine.generate(prompt_ids=prompt_ids, params=params, use_draft=False).token_ids
    places = []
    for form in forms:
        if form.chains_only:
            drafted = form.engine.generate(prompt_ids=prompt_ids, params=params, drafting=form.drafting)
            places.append(first_difference(plain, drafted.token_ids))
    return min((place for place in places if place is not None), default=None)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first index at which two sequences differ or one has ended; None if they are equal."""
    return next((at for at, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)
