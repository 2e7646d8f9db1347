"""Additive attention masks of the rows that a verify forward feeds: which keys each row sees.

Knows positions of rows and keys; does not know how keys are stored or what is computed with the mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash.core.tree import ancestor_matrix


class BlockMask:
    """Additive causal mask of a block of rows behind n committed tokens: row j sees the keys 0..n+j.

    The buffer lives as long as the storage keeps its capacity; moving on changes only the columns that n passed and the
    triangle of the block. Rows are never fully masked (each sees itself).
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._hidden = torch.finfo(dtype).min  # not -inf: eager attention adds it to scores
        self._buffer = torch.empty(1, 1, 0, 0, device=device, dtype=dtype)
        self._start = 0

    def rows(self, start: int, num_rows: int, num_keys: int, capacity: int) -> torch.Tensor:
        """Mask [1, 1, num_rows, num_keys] for rows at positions start..; a view that the next call changes."""
        buffer = self._buffer
        if buffer.shape[2] < num_rows or buffer.shape[3] != capacity or start < self._start:
            buffer = self._buffer = buffer.new_full((1, 1, max(num_rows, buffer.shape[2]), capacity), self._hidden)
            self._start = 0
            self._move(start)
        elif start != self._start:
            self._move(start)
        mask = buffer[:, :, :num_rows]
        return mask if num_keys == capacity else mask[..., :num_keys]

    def _move(self, start: int) -> None:
        """Set the buffer for blocks at `start`, at or behind the present one."""
        block = self._buffer[0, 0]
        block[:, self._start : start] = 0
        triangle = block[:, start : start + block.shape[0]]  # narrower at the end of the storage
        triangle.fill_(self._hidden).triu_(diagonal=1)
        self._start = start


def tree_mask(
    mask: torch.Tensor,  # [1, 1, rows, keys], causal
    start: int,
    parents: Sequence[int],
) -> torch.Tensor:
    """The mask of a tree: row i sees the `start` committed keys, its ancestors and itself. A copy of the same shape;
    padding rows see themselves and what is committed."""
    num_rows = mask.shape[2]
    seen = torch.from_numpy(ancestor_matrix(parents, num_rows)).to(mask.device)
    mask = mask.clone()
    block = mask[0, 0, :, start : start + num_rows]  # narrower at the end of the storage
    block.fill_(torch.finfo(mask.dtype).min).masked_fill_(seen[:, : block.shape[1]], 0)
    return mask
