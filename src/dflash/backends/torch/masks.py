"""Additive attention masks of the rows that a verify forward feeds: which keys each row sees.

Knows positions of rows and keys and that layers differ in what they see; does not know how keys are stored or what is
computed with the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from dflash.backends.torch.attention import AttentionForm
from dflash.backends.torch.compat import LayerSpec
from dflash.backends.torch.state import SessionCache
from dflash.core.tree import ancestor_matrix, row_positions
from dflash.types import Proposal

ModelMask: TypeAlias = torch.Tensor | dict[str, torch.Tensor | None] | None
"""What a model takes: one mask for all layers that attend, or one per type of layer."""


class SessionMasks:
    """The masks of one session's forwards, in the form that its model takes."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        device: torch.device,
        dtype: torch.dtype,
        attention: AttentionForm,
    ) -> None:
        self._attention = attention
        self._block = BlockMask(device, dtype)
        self._layers: dict[str, int] = {}
        """Mask key -> the first layer that stores keys for it."""
        for index, spec in enumerate(specs):
            if spec.mask is not None and spec.state != "DummyLayer":
                self._layers.setdefault(spec.mask, index)
        self._windows = {mask: specs[index].window for mask, index in self._layers.items()}

    def of(self, cache: SessionCache, num_rows: int, proposal: Proposal) -> ModelMask:
        """For a forward of `proposal` that `cache` has begun; `num_rows` as `AttentionForm` says: those behind the
        proposal's are padding, and those behind the fed ones have no key."""
        span = cache.span
        full = self._block.rows(span.start, num_rows, span.num_keys, span.capacity)
        if proposal.parents is not None:
            full = tree_mask(full, span.start, proposal.parents)
        positions = row_positions(span.start, num_rows, proposal)
        masks: dict[str, torch.Tensor] = {}
        for mask, layer in self._layers.items():
            window = self._windows[mask]
            if window is None:
                masks[mask] = full
                continue
            returned = cache.get_mask_sizes(span.num_rows, layer)
            chunked = mask == "chunked_attention"
            masks[mask] = window_mask(full, positions, span.start, returned, window, chunked=chunked)
        masks = {name: self._attention.mask(mask) for name, mask in masks.items()}
        if len(masks) > 1:
            return {**masks, "linear_attention": None, "conv": None}
        return next(iter(masks.values()), None)


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


def window_mask(
    full: torch.Tensor,  # [1, 1, rows, keys], of a layer that sees the whole context
    positions: Sequence[int],  # of the rows
    start: int,
    returned: tuple[int, int],
    window: int,
    *,
    chunked: bool = False,
) -> torch.Tensor:
    """The mask of a layer with a window: what `full` shows, less the keys that lie too far back.

    Args:
        full: key t of the text is its column t; row i's own key is column start + i.
        positions: of a tree's rows by depth, else start, start + 1 ...
        returned: (keys that the layer returns, position of the first one; negative: keys in front of the text).
        window: keys that a row sees at most, itself included; with `chunked` the length of the chunks into which
            positions are cut, beyond whose borders nobody sees.

    Returns: [1, 1, rows, keys returned].
    """
    num_keys, first = returned
    num_rows = full.shape[2]
    mask = full.new_full((1, 1, num_rows, num_keys), torch.finfo(full.dtype).min)
    begin, end = max(first, 0), min(first + num_keys, full.shape[3])
    mask[..., begin - first : end - first] = full[..., begin:end]
    at = torch.tensor(positions, device=full.device)
    key_positions = torch.arange(first, first + num_keys, device=full.device)
    own = key_positions[start - first : start - first + num_rows]  # narrower where surplus rows have no key
    own.copy_(at[: len(own)])
    near = at[:, None] // window == key_positions // window if chunked else at[:, None] - key_positions < window
    return mask.masked_fill_(~near, torch.finfo(full.dtype).min)
