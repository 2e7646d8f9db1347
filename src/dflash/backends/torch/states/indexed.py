"""Full keys and values plus the keys of a sparse-attention indexer, which chooses what each row attends to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash.backends.torch.compat import LayerSpec
from dflash.backends.torch.states.base import Span, gather, grown, is_prefix
from dflash.backends.torch.states.full import FullKeyValueState


class IndexedState(FullKeyValueState):
    """As `FullKeyValueState`, with indexer keys [B, capacity, index_head_dim] beside them."""

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
            self.indexer_keys = grown(indexer_key_states[:, :0], span.capacity, dim=1)
        assert indexer_key_states.shape[1] == span.num_rows
        self.indexer_keys.narrow(1, span.start, span.num_rows).copy_(indexer_key_states)
        return self.indexer_keys.narrow(1, 0, span.num_keys)

    def reserve(self) -> None:
        super().reserve()
        if self.indexer_keys is not None:
            self.indexer_keys = grown(self.indexer_keys, self.span.capacity, dim=1)

    def commit(self, path: Sequence[int]) -> None:
        super().commit(path)
        if self.indexer_keys is not None and not is_prefix(path):
            gather(self.indexer_keys, self.span.start, path, dim=1)

    def free(self) -> None:
        super().free()
        self.indexer_keys = None

    def committed(self) -> list[torch.Tensor]:
        indexer = [] if self.indexer_keys is None else [self.indexer_keys[:, : self.span.start]]
        return [*super().committed(), *indexer]
