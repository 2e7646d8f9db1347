"""Plain decoding and DFlash on one prompt, run in turn: what `dflash demo` shows.

The speed-up is divided by plain decoding in its *fastest* form: one unpadded row per forward, no draft, on the kernels
that were faster at load. Should the bit-exact form nevertheless come out faster, it is divided by that one. The tokens
are compared with plain decoding in its *bit-exact* form (padded to the probed width), which is what the
draft promises to reproduce; on a machine where the probe found no such width a difference is looked up: how far
apart were the target's two best tokens there?
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash.prepare.prompts import Conversation
from dflash.types import Result, SamplingParams

if TYPE_CHECKING:
    from dflash.core.engine import Engine

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Difference:
    """The first place where two token sequences part."""

    position: int
    """Index in the output, from 0."""
    plain: str
    """What plain decoding said there ('' if it had ended)."""
    dflash: str
    margin: float
    """Logit of the target's best token minus its second best there; near 0 = a tie that rounding decides."""


@dataclass(frozen=True)
class Comparison:
    """All runs on one prompt. Speeds are decode tokens per second over all repeats."""

    prompt: Conversation
    plain: tuple[Result, ...]
    """Fastest form, one per repeat."""
    padded: Result
    """Bit-exact form."""
    dflash: tuple[Result, ...]
    difference: Difference | None
    """None: the draft changed no token."""

    @property
    def speedup(self) -> float:
        """DFlash's speed over that of the faster plain form; nan if either made a single token only."""
        return speed(self.dflash) / plain_speed([self])


def speed(results: Iterable[Result]) -> float:
    """Tokens per second of decoding, prefills and first tokens left out; nan without a round."""
    stats = [result.stats for result in results]
    seconds = sum(one.decode_seconds for one in stats)
    return sum(sum(one.acceptance_lengths) for one in stats) / seconds if seconds else float("nan")


def plain_speed(comparisons: Sequence[Comparison]) -> float:
    """Tokens per second of the faster plain form over all prompts: no speed-up is divided by less."""
    return max(speed(r for one in comparisons for r in one.plain), speed(one.padded for one in comparisons))


def num_runs(num_prompts: int, repeats: int) -> int:
    """Generations that `compare` makes for so many prompts."""
    return num_prompts * (2 * repeats + 1)


def warm_up(engine: Engine, prompt: Conversation) -> None:
    """First forwards allocate and choose kernels: keep them out of the figures."""
    params = SamplingParams(max_new_tokens=WARM_UP_TOKENS)
    engine.generate(prompt.opening(), params, use_draft=False, exact=False)
    engine.generate(prompt.opening(), params)


def compare(
    engine: Engine, prompt: Conversation, params: SamplingParams, repeats: int, tick: Callable[[], object]
) -> Comparison:
    """Run plain and DFlash alternately, `repeats` times each, and the bit-exact plain form once.

    `tick` is called after each run. Alternating keeps a machine that slows down from favouring either side.
    """

    def run(use_draft: bool, exact: bool | None) -> Result:
        result = engine.generate(prompt.opening(), params, use_draft=use_draft, exact=exact)
        tick()
        return result

    plain: list[Result] = []
    dflash: list[Result] = []
    for _ in range(repeats):
        plain.append(run(use_draft=False, exact=False))
        dflash.append(run(use_draft=True, exact=None))
    padded = run(use_draft=False, exact=None)
    return Comparison(
        prompt,
        tuple(plain),
        padded,
        tuple(dflash),
        find_difference(engine, prompt, padded.token_ids, dflash[0].token_ids),
    )


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first index at which two sequences differ or one has ended; None if they are equal."""
    if list(ours) == list(theirs):
        return None
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def find_difference(
    engine: Engine, prompt: Conversation, plain: Sequence[int], dflash: Sequence[int]
) -> Difference | None:
    """Where DFlash left plain decoding, with the target's top-2 margin there; None if it did not."""
    position = first_difference(plain, dflash)
    if position is None:
        return None

    def said(ids: Sequence[int]) -> str:
        return engine.decode(ids[position : position + 1])

    fed = [*engine.tokenize(prompt.opening()), *plain[:position]]
    return Difference(position, said(plain), said(dflash), _top_two_margin(engine, fed))


def _top_two_margin(engine: Engine, fed: Sequence[int]) -> float:
    """Best minus second-best logit of the token after `fed`."""
    import numpy as np

    session = engine.target.session(exact=True, features=False)
    try:
        second, best = np.sort(engine.as_numpy(session.prefill(fed).logits[-1]))[-2:]
    finally:
        session.close()
    return float(best - second)
