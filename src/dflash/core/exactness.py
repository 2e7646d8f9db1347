"""The search for forwards that give the same bits (docs/exactness.md), over any backend's sessions.

Knows widths and which of them to compare; the kernels, and what a session pads, are a backend's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dflash.core.key_lengths import BUCKETS, KeyLengths
from dflash.types import Proposal, Verdict

LONGER = (256, 640)
"""Keys of the forwards that stand for longer texts: some more, and more than the 512 that CPU attention splits
keys into."""
PROBED_WIDTH = 16
"""Rows of the widest forward that the load-time probe covers; a wider block is probed at its own width."""
WIDEST_ON_DEVICES = 64
"""Rows of the widest forward on devices where rows cost next to nothing and bits are not promised."""
NUM_FIRST = 4
"""Tokens that are tried among equal and among different ones."""


@dataclass(frozen=True)
class WidthClass:
    """What the probe found."""

    holds: bool
    """Bit-exact decoding is possible here: all tried widths from `width` on agree."""
    width: int
    """Least number of rows of every decoding forward; 1 where `holds` is false."""
    widths_tried: tuple[int, ...]
    """Forward widths whose rows were compared with those of the widest, ascending."""
    reason: str
    """One sentence for people: what holds, or what differed first."""
    key_lengths: KeyLengths = BUCKETS
    """Numbers of keys that decoding forwards get."""


LENGTHS_DIFFER = WidthClass(False, 1, (), "attention's sums depend on how many keys it gets.")
"""Where `find_key_lengths` finds none."""


class ProbedSession(Protocol):
    """What the probe uses of a target's session in exact mode."""

    def return_at_least(self, num_keys: int) -> None: ...
    def prefill(self, prompt_ids: Sequence[int]) -> Verdict: ...
    def verify(self, anchor: int, proposal: Proposal) -> Verdict: ...
    def commit(self, path: Sequence[int]) -> None: ...


def find_width_class(
    session: ProbedSession, vocab_size: int, max_width: int, block_size: int, same: Callable[[Any, Any], bool]
) -> WidthClass:
    """Probe a fresh session (see the backends' `probe`); `same`: whether two [rows, V] of it have the same bits."""
    shift = max_width // 8 * 2 + 1  # odd: no multiple of a kernel's tile
    text = probe_text(max_width + shift + max_width, vocab_size)
    session.prefill(text[:max_width])
    text = text[max_width:]
    reference = probe_rows(session, text[:max_width])
    session.commit(range(shift))
    text, reference = text[shift:], reference[shift:]

    def repeats(tokens: list[int]) -> bool:
        """Whether one forward of `tokens` gives the reference's bits, where it has these rows."""
        rows = probe_rows(session, tokens)
        num_shared = min(len(rows), len(reference))
        return same(rows[:num_shared], reference[:num_shared])

    tried: list[int] = []
    width = 0
    for candidate in _candidates(max_width, block_size):
        tried.insert(0, candidate)
        if not repeats(text[:candidate]):
            break
        width = candidate

    def fails(reason: str) -> WidthClass:
        return WidthClass(False, 1, tuple(tried), f"{reason}.")

    if not width:
        return fails(f"a row's result depends on its place in a forward of {max_width} rows")
    if width == max_width:
        return fails(f"forwards of {tried[0]} and {max_width} rows differ")
    for num_keys in LONGER:
        session.return_at_least(num_keys)
        if not repeats(text[:width]):
            return fails(f"results change when attention runs over {num_keys} keys")
    if not _ignores_other_rows(session, text, width, max_width, same):
        return fails("a row's result depends on the tokens beside it, as where experts are chosen per token")
    narrower = f"; {tried[0]} differ" if tried[0] < width else ""
    return WidthClass(
        True, width, tuple(tried), f"forwards of {width} to {max_width} rows give the same bits{narrower}."
    )


def _ignores_other_rows(
    session: ProbedSession, text: list[int], width: int, max_width: int, same: Callable[[Any, Any], bool]
) -> bool:
    """Whether the first row has the same bits among equal rows, as padding makes them, and among different ones. An
    expert multiplies the rows that chose it, so their number depends on what the other rows are."""
    for token in text[:NUM_FIRST]:
        equal = probe_rows(session, [token] * max_width)[:1]
        different = probe_rows(session, [token, *text[: max(1, width - 1)]])[:1]
        if not same(equal, different):
            return False
    return True


def probe_rows(session: ProbedSession, tokens: list[int]) -> Any:
    """Logits [len(tokens), V] of one forward of exactly these rows; not committed."""
    return session.verify(tokens[0], Proposal(tuple(tokens[1:]))).logits


def _candidates(max_width: int, block_size: int) -> list[int]:
    """Widths to compare, widest first: all up to 8 and up to the block, beyond them odd ones (where kernels have
    remainders) and powers of two."""
    widths = {max_width, 23, 16, 11, *range(1, max(8, block_size) + 1)}
    return sorted((width for width in widths if width <= max_width), reverse=True)


def probe_text(length: int, vocab_size: int) -> list[int]:
    """Token ids without a pattern that attention could lock on to."""
    ids: list[int] = np.random.default_rng(0).integers(vocab_size, size=length).tolist()
    return ids
