"""How many keys attention may get in exact mode, so that their number changes no bit (docs/exactness.md).

A forward gets more keys than its rows see, the surplus masked, so that plain and speculative decoding run the same
shapes. At the end of a bucket they do not: a plain step still fits into it, a block behind the same text needs the next
one. Kernels may sum in an order that depends on the number of keys. MKL's float32 products, say, halve 193 to 383
terms and cut all others into pieces of 192, so that 256 keys give other bits than 384. Knows which numbers of keys to
compare, over any backend's attention; does not know kernels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

BLOCK = 512
"""Keys that PyTorch's CPU attention takes at a time; lengths repeat with it."""
WIDTHS = (1, 16)
"""Rows of the forwards whose sums are compared: a plain step's and a block's."""
Attend: TypeAlias = Callable[[int, int], Any]
"""Attention of fixed queries over fixed keys: (keys that every row sees, keys that the forward gets) -> rows."""


@dataclass(frozen=True)
class KeyLengths:
    """Numbers of keys between which no bit changes: those of `within` behind any number of whole blocks."""

    within: tuple[int, ...]
    """Ascending; the last one is the block."""

    def __post_init__(self) -> None:
        assert self.within == tuple(sorted(set(self.within)))
        assert self.within[0] > 0

    def least(self, num_keys: int) -> int:
        """The least of these numbers that holds `num_keys`."""
        whole, rest = divmod(num_keys, self.within[-1])
        return whole * self.within[-1] + (self.within[bisect_left(self.within, rest)] if rest else 0)


BUCKETS = KeyLengths((128, 256, 384, BLOCK))
"""Where nothing was measured."""


def find_key_lengths(attend: Attend, same: Callable[[Any, Any], bool], step: int) -> KeyLengths | None:
    """The multiples of `step` that may be used, found by comparing bits with attention over more keys.

    Args:
        attend: of any data, over at least three blocks of keys.
        same: whether two results have the same bits.
        step: keys; divides the block.

    Returns:
        None if not even whole blocks give the same bits.
    """
    assert BLOCK % step == 0

    def agrees(begin: int, length: int) -> bool:
        """Whether as many keys behind `begin` give the bits of a block and more. Rows that see fewer add zeros."""
        seen = begin + length
        return same(attend(seen, seen), attend(seen, begin + 2 * BLOCK))

    found = [length for length in range(step, BLOCK + 1, step) if agrees(0, length) and agrees(BLOCK, length)]
    return KeyLengths(tuple(found)) if found and found[-1] == BLOCK else None
