"""The draft vocabulary: which rows of the target's head the draft scores.

Most answers use a small part of the vocabulary, and for a small target the head costs more than the draft's
layers. Restricting the draft to the most frequent answer tokens changes nothing about losslessness: a token outside
is simply never proposed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


def most_frequent(answers: Iterable[Sequence[int]], size: int, always: Iterable[int] = ()) -> list[int]:
    """The `size` most frequent token ids of the answers (ties by id) and those in `always`, ascending."""
    counts: Counter[int] = Counter()
    for answer in answers:
        counts.update(answer)
    keep = set(always)
    for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(keep) >= size:
            break
        keep.add(token)
    return sorted(keep)
