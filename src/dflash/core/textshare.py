"""How much of a text is a loop or a copy: two measures that belong beside every speed-up.

Degenerate loops and copied passages are easy to guess, so they flatter any drafter. Works on token ids alone and knows
nothing of models. A token *loops* if it repeats what stands one period before it, inside a stretch in which a pattern
comes at least three times; it is *copied* if it lies in a run of tokens that the prompt holds, too; it is *repeated* if
such a run stands anywhere before it, in the prompt or in the output (what a copying drafter could have guessed).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_PERIOD = 64
"""Longest pattern, in tokens, whose repetition counts as a loop."""
MIN_REPEATS = 3
"""A pattern must come so often in a row; twice happens in good prose."""
MIN_LOOP = 16
"""Shorter stretches are indentation, rulers and ellipses rather than loops (tokens, the first pattern included)."""
MIN_COPY = 8
"""Runs of fewer tokens are common phrases rather than copies."""


@dataclass(frozen=True)
class TextShare:
    """Counts of one output or of several added up; the shares are nan without a token."""

    num_tokens: int = 0
    num_looping: int = 0
    num_copied: int = 0
    num_repeated: int = 0

    @property
    def looping(self) -> float:
        """Share of tokens that repeat a loop's pattern; its first round is not counted."""
        return self._share(self.num_looping)

    @property
    def copied(self) -> float:
        """Share of tokens in runs copied from the prompt."""
        return self._share(self.num_copied)

    @property
    def repeated(self) -> float:
        """Share of tokens in runs that the prompt or the output before them holds; loops belong to it."""
        return self._share(self.num_repeated)

    def __add__(self, other: TextShare) -> TextShare:
        return TextShare(
            self.num_tokens + other.num_tokens,
            self.num_looping + other.num_looping,
            self.num_copied + other.num_copied,
            self.num_repeated + other.num_repeated,
        )

    def _share(self, count: int) -> float:
        return count / self.num_tokens if self.num_tokens else float("nan")


def text_share(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> TextShare:
    """Measure one output. The prompt is what the model was fed, its chat template included."""
    return TextShare(
        num_tokens=len(output_ids),
        num_looping=sum(looping_tokens(output_ids)),
        num_copied=sum(copied_tokens(prompt_ids, output_ids)),
        num_repeated=sum(repeated_tokens(prompt_ids, output_ids)),
    )


def pooled(shares: Iterable[TextShare]) -> TextShare:
    """Several outputs as one."""
    return sum(shares, TextShare())


def looping_tokens(output_ids: Sequence[int]) -> list[bool]:
    """[i]: token i repeats the token one period before it inside a loop. O(tokens x MAX_PERIOD)."""
    looping = [False] * len(output_ids)
    for period in range(1, min(MAX_PERIOD, len(output_ids) // MIN_REPEATS) + 1):
        start = period  # first token of the stretch in which every token equals the one a period before
        for index in range(period, len(output_ids) + 1):
            if index < len(output_ids) and output_ids[index] == output_ids[index - period]:
                continue
            length = period + index - start
            if length >= max(MIN_REPEATS * period, MIN_LOOP):
                looping[start:index] = [True] * (index - start)
            start = index + 1
    return looping


def copied_tokens(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[bool]:
    """[i]: output token i lies in a run of at least MIN_COPY tokens that the prompt holds."""
    runs = {tuple(prompt_ids[at : at + MIN_COPY]) for at in range(len(prompt_ids) - MIN_COPY + 1)}
    copied = [False] * len(output_ids)
    for end in range(MIN_COPY, len(output_ids) + 1):
        if tuple(output_ids[end - MIN_COPY : end]) in runs:
            copied[end - MIN_COPY : end] = [True] * MIN_COPY
    return copied


def repeated_tokens(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[bool]:
    """[i]: output token i lies in a run of at least MIN_COPY output tokens that stands somewhere before (it may overlap
    its earlier occurrence, as in a loop)."""
    text = [*prompt_ids, *output_ids]
    repeated = [False] * len(text)
    seen: set[tuple[int, ...]] = set()
    for end in range(MIN_COPY, len(text) + 1):
        run = tuple(text[end - MIN_COPY : end])
        if end - MIN_COPY >= len(prompt_ids) and run in seen:
            repeated[end - MIN_COPY : end] = [True] * MIN_COPY
        seen.add(run)
    return repeated[len(prompt_ids) :]
