"""Keyed randomness: a draw is a pure function of (seed, position), never of how decoding got there.

The token at sequence position p (prompt and output counted together) is always drawn with
`uniform(seed, p)`, by inverse CDF in order of token ids. A rejected proposal, another block width or no
drafter at all therefore change nothing: same seed, same text. Proposals that are drawn from the draft's distribution
(`core/sampled.py`) need two streams more, independent of that one and of each other (arXiv:2211.17192): whether a drawn
token is accepted is decided by another word of its position's counter, and the draft draws from a generator of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_WORDS_PER_COUNTER = 4
"""One step of Philox4x64's counter yields four 64-bit words; one position owns one step."""
_DRAFT_KEY = 1 << 64
"""Above all seeds: the other half of the key."""

TARGET, ACCEPTANCE = 0, 1
"""Words of a position's counter: its token's draw, and whether a drawn draft token is accepted there."""


def uniforms(seed: int, position: int, count: int, word: int = TARGET) -> NDArray[np.float64]:
    """The draws of `count` consecutive positions, [count] in [0, 1); seed and position in [0, 2^63).

    Raw words of the bit generator rather than `Generator.random`: only the former are promised to stay
    the same across NumPy versions.
    """
    generator = np.random.Philox(key=seed, counter=position)
    words = generator.random_raw(_WORDS_PER_COUNTER * count)[word::_WORDS_PER_COUNTER]
    return np.asarray((words >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) that decides the token at `position`."""
    return float(uniforms(seed, position, 1)[0])


def draft_generator(seed: int) -> np.random.Generator:
    """What a request's draft draws with: another key than any position's, so that it tells nothing of the target's."""
    return np.random.Generator(np.random.Philox(key=seed + _DRAFT_KEY))
