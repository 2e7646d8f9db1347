"""What every kind of layer state has in common: where a forward writes, and what it must answer for.

The contract of a forward: `begin` is called with the span set; the model reads and writes the state; `commit(path)`
keeps some of the fed rows, as if only these had ever been fed: of a chain the first ones, of a tree those from the root
to a node. A forward that nobody commits is forgotten by the next `begin`. What lies behind the committed length is
garbage that later forwards overwrite and that masks never let a row see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash.backends.torch.compat import LayerSpec
from dflash.core.key_lengths import BUCKETS, KeyLengths

BUCKET = 128
"""Storage grows in whole buckets of so many keys."""


@dataclass(slots=True)
class Span:
    """Where the running forward writes and what it gets back; one object shared by all layers of a session."""

    bucket: int = BUCKET
    lengths: KeyLengths = BUCKETS
    """Numbers of keys that the model gets in exact mode."""
    start: int = 0
    """First row written = committed length."""
    num_rows: int = 0
    """Rows fed, padding included."""
    num_keys: int = 0
    """Keys of layers that see the whole context, returned to the model."""
    capacity: int = 0
    """Keys that the storage of such layers must hold."""
    least_keys: int = 0
    """Keys that are returned at least in exact mode."""
    lead: int = 0
    """Masked keys that window layers return in front of the text (the probe's test); whole pages."""
    exact: bool = False
    """Whether the running forward gets one of `lengths`, the tail masked."""

    def whole_buckets(self, num_keys: int) -> int:
        """The least multiple of the bucket that holds `num_keys`."""
        return -(-num_keys // self.bucket) * self.bucket


class LayerState(ABC):
    """State of one layer. Subclasses store it; `commit` must leave it as if only the kept rows had been fed."""

    supports_trees = False
    """Whether rows of one forward may belong to different branches: `commit` then takes paths that are no prefix."""
    keeps_prefixes = True
    """Whether `commit` can keep a part of the fed rows; if not, all or none, and the kept rows are fed again."""
    rewinds = False
    """Whether committed rows can be taken back by moving the shared length alone."""

    mask_has_fed_rows = False
    """Whether the layer combines the mask with something of exactly the fed rows: the mask can have no surplus rows."""

    def __init__(self, span: Span, spec: LayerSpec) -> None:
        self.span = span
        self.spec = spec

    def begin(self) -> None:  # noqa: B027  # most kinds have nothing to do
        """Prepare the forward that `span` describes; rows of an earlier one that nobody committed are forgotten."""

    def reserve(self) -> None:  # noqa: B027  # most kinds have nothing to do
        """Grow storage to `span.capacity`; what is committed stays."""

    @abstractmethod
    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows `path` of the last forward (ascending), as if only these had been fed. Called before the
        committed length moves."""

    @abstractmethod
    def free(self) -> None:
        """Give the memory back."""

    @abstractmethod
    def committed(self) -> list[torch.Tensor]:
        """Copies or views of what a fresh run over the committed tokens would hold as well (oracles, audits)."""

    def get_seq_length(self) -> int:
        """Committed tokens."""
        return self.span.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys returned, position of the first one), for masks that Transformers builds itself."""
        return self.span.num_keys, 0

    def get_max_length(self) -> int:
        """No limit of its own (-1): the session checks the context length."""
        return -1

    get_max_cache_shape = get_max_length  # its name before Transformers 5.20


def gather(stored: torch.Tensor, start: int, path: Sequence[int], dim: int = 2) -> None:
    """Move the rows start + path of `stored` together, to start, start + 1 ...; in place."""
    rows = torch.tensor(path, device=stored.device) + start
    stored.narrow(dim, start, len(path)).copy_(stored.index_select(dim, rows))


def grown(tensor: torch.Tensor, num_keys: int, dim: int = 2) -> torch.Tensor:
    """Copy of `tensor` with room for `num_keys` keys along `dim`. Zeros, not empty: masked values are multiplied by a
    probability of zero, and zero times an uninitialised NaN is NaN."""
    shape = list(tensor.shape)
    shape[dim] = num_keys
    result = tensor.new_zeros(shape)
    result.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return result
