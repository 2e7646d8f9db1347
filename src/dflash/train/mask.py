"""The training attention rule in its plainest form: the definition that fast paths are tested against.

All blocks of a sequence stand after its S context rows. Query = slot i of block j; it may attend to
    context row t       iff  t < anchor_j           (the anchor's own feature does not exist yet)
    slot i' of block j' iff  j' = j                 (bidirectional inside the block, nothing across blocks)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def dense_mask(anchors: Sequence[int], *, num_context: int, block_size: int) -> NDArray[np.bool_]:
    """[A*B, S + A*B] True where a block row may attend, written as four nested loops on purpose."""
    rows = len(anchors) * block_size
    mask = np.zeros((rows, num_context + rows), dtype=np.bool_)
    for j, anchor in enumerate(anchors):
        for i in range(block_size):
            for t in range(num_context):
                mask[j * block_size + i, t] = t < anchor
            for other in range(block_size):
                mask[j * block_size + i, num_context + j * block_size + other] = True
    return mask
