"""Attention of the few rows of a decoding forward on a CPU.

Transformers copies keys and values once per query head whenever there is a mask, and the CPU kernel alone reads them
once per query head. For a few rows over a long cache that costs more than the sums. Here the query heads that share a
key/value head are the rows of one: it is read once. Knows the CPU kernel's blocks; does not know models or sessions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

KERNEL_BLOCK = 32
"""Rows that PyTorch's kernel takes at a time as long as there are fewer than 192."""
LEAST_ROWS = 4
"""Blocks of 1, 2 and 3 rows are summed in orders of their own."""
MOST_ROWS = 191
MOST_HEADS = 5
"""Query heads of a key/value head that are attended together: so 32 rows of each stay below `MOST_ROWS`."""


@dataclass(frozen=True)
class AttentionForm:
    """The masks that a model's attention takes for the rows of one forward."""

    least_rows: int = 1
    """In exact mode; more rows than are fed are computed and dropped."""
    group: int = 1
    """Query heads that attend together: a mask has so many copies."""

    @classmethod
    def on_cpu(cls, group: int) -> AttentionForm:
        """For `grouped_attention` in a model all of whose layers have `group` query heads per key/value head."""
        return cls(group=group) if 1 < group <= MOST_HEADS else cls(least_rows=LEAST_ROWS)

    def num_rows(self, width: int, *, exact: bool) -> int:
        """Rows of the mask for a forward of `width` rows. In exact mode no block of the kernel then has so few rows
        that it is summed in another order. The heads of a single row stand for rows (`attend`)."""
        if not exact or (self.group > 1 and width == 1):
            return width
        num_rows = max(width, self.least_rows)
        while self.group > 1 and 0 < self.group * num_rows % KERNEL_BLOCK < LEAST_ROWS:
            num_rows += 1
        return num_rows

    def mask(self, mask: torch.Tensor) -> torch.Tensor:
        """The mask [1, 1, rows, keys] of one head as the model takes it: [1, `group`, rows, keys], made once for all
        layers. With too many rows to attend together it stays as it is."""
        if self.group == 1 or self.group * mask.shape[2] > MOST_ROWS:
            return mask
        return mask.repeat(1, self.group, 1, 1)


def attend(
    query: torch.Tensor,  # [B, heads, rows, head_dim]
    key: torch.Tensor,  # [B, kv_heads, keys, head_dim]
    value: torch.Tensor,  # [B, kv_heads, keys, head_dim]
    mask: torch.Tensor | None,  # [B or 1, 1 or heads or group, rows or more, keys]
    scaling: float | None,
) -> torch.Tensor:
    """Attention [B, heads, rows, head_dim] of the rows of one forward.

    A mask with more rows than the query asks for that many rows to be computed and the surplus dropped: a kernel that
    treats a single row differently from several then gives the same bits for both. A mask with a copy for each query
    head of a group (`AttentionForm.mask`) asks for these heads to be attended together.
    """
    batch, heads, num_rows, width = query.shape
    kv_heads = key.shape[1]
    if mask is not None and mask.shape[2] > num_rows:
        query = pad(query, (0, 0, 0, mask.shape[2] - num_rows))
    if mask is not None and mask.shape[1] == heads // kv_heads > 1:
        if num_rows == mask.shape[2] == 1:
            return _attend_single(query, key, value, mask, scaling)
        joint = query.reshape(batch, kv_heads, -1, width)
        joint_mask = mask.reshape(mask.shape[0], 1, -1, mask.shape[3])
        attended = scaled_dot_product_attention(joint, key, value, attn_mask=joint_mask, scale=scaling)
        return attended.reshape(batch, heads, -1, value.shape[3])[:, :, :num_rows]
    if mask is not None and mask.shape[1] not in (1, heads) and torch.equal(mask, mask[:, :1].expand_as(mask)):
        mask = mask[:, :1]  # copies for layers with other heads than these; PyTorch refuses whatever else does not fit
    attended = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return attended[:, :, :num_rows]


def _attend_single(
    query: torch.Tensor,  # [B, heads, 1, head_dim]
    key: torch.Tensor,  # [B, kv_heads, keys, head_dim]
    value: torch.Tensor,  # [B, kv_heads, keys, head_dim]
    mask: torch.Tensor,  # [B or 1, group, 1, keys]
    scaling: float | None,
) -> torch.Tensor:
    """As `attend` for one row: the heads of a group are its rows, and only what these lack to `LEAST_ROWS` is padded,
    by the first ones again."""
    batch, heads, _, width = query.shape
    group = mask.shape[1]
    rows = query.reshape(batch, key.shape[1], group, width)
    # Of a single key/value head, copies for a group look like a mask per head.
    seen = mask[:, :1] if key.shape[1] > 1 else mask.transpose(1, 2)
    if missing := max(0, LEAST_ROWS - group):
        rows = torch.cat((rows, rows[:, :, :missing]), dim=2)
        seen = seen if key.shape[1] > 1 else torch.cat((seen, seen[:, :, :missing]), dim=2)
    seen = seen.expand(-1, 1, rows.shape[2], -1)
    attended = scaled_dot_product_attention(rows, key, value, attn_mask=seen, scale=scaling)
    return attended[:, :, :group].reshape(batch, heads, 1, value.shape[3])
