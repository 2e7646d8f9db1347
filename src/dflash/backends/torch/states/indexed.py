"""Full keys and values plus the keys of a sparse-attention indexer, which chooses what each row attends to: single keys
(DeepSeek's sparse attention) or blocks of keys (MiniMax-M3's)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash.backends.torch.compat import LayerSpec
from dflash.backends.torch.states.base import Span, gather, grown
from dflash.backends.torch.states.full import FullKeyValueState
from dflash.core.tree import is_prefix


class IndexedState(FullKeyValueState):
    """As `FullKeyValueState`, with indexer keys beside them: [B, capacity, index_head_dim]."""

    mask_has_fed_rows = True
    rewinds = False  # rolled back by `commit` only
    key_dim = 1
    """Dimension of the indexer's keys along which they are counted."""

    indexer_position_ids = None
    """Positions of the indexer's keys, where a model keeps them apart; ours are always 0, 1, 2 ..."""

    def __init__(self, span: Span, spec: LayerSpec) -> None:
        super().__init__(span, spec)
        self.indexer_keys: torch.Tensor | None = None

    def update_indexer(
        self,
        indexer_key_states: torch.Tensor,  # [B, rows, index_head_dim]
    ) -> torch.Tensor:
        """Write the indexer keys of the running forward; return all of them, [B, span.num_keys, index_head_dim]."""
        span = self.span
        if self.indexer_keys is None:
            self.indexer_keys = grown(indexer_key_states.narrow(self.key_dim, 0, 0), span.capacity, dim=self.key_dim)
        assert indexer_key_states.shape[self.key_dim] == span.num_rows
        self.indexer_keys.narrow(self.key_dim, span.start, span.num_rows).copy_(indexer_key_states)
        return self.indexer_keys.narrow(self.key_dim, 0, span.num_keys)

    def reserve(self) -> None:
        super().reserve()
        if self.indexer_keys is not None:
            self.indexer_keys = grown(self.indexer_keys, self.span.capacity, dim=self.key_dim)

    def commit(self, path: Sequence[int]) -> None:
        super().commit(path)
        if self.indexer_keys is not None and not is_prefix(path):
            gather(self.indexer_keys, self.span.start, path, dim=self.key_dim)

    def free(self) -> None:
        super().free()
        self.indexer_keys = None

    def committed(self) -> list[torch.Tensor]:
        indexer = [] if self.indexer_keys is None else [self.indexer_keys.narrow(self.key_dim, 0, self.span.start)]
        return [*super().committed(), *indexer]


class BlockIndexedState(IndexedState):
    """Indexer keys [B, 1, capacity, index_head_dim] whose scores are taken by blocks of positions: the rows of a tree,
    which are stored by row and not by position, would count in a wrong block."""

    supports_trees = False
    key_dim = 2

    def update_index(
        self,
        idx_k: torch.Tensor,  # [B, 1, rows, index_head_dim]
    ) -> torch.Tensor:
        """`update_indexer` under the name that the model calls."""
        return self.update_indexer(idx_k)
