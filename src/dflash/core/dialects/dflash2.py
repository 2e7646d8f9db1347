"""DFlash 2 in z-lab's layout: v1 plus dynamic convolutions around each sublayer and a candidate selector."""

from __future__ import annotations

from dflash.core.dialects import zlab
from dflash.core.dialects.base import NESTED, Checkpoint, Dialect, Lookup
from dflash.core.draft_config import DraftConfig

_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def matches(found: Checkpoint) -> bool:
    """By class name, by the size of a convolution or selector, or by their tensors."""
    levels = (found.level(NESTED), found.raw)
    return (
        zlab.DFLASH2_ARCHITECTURE in found.architectures
        or any(bool(level.get(key)) for level in levels for key in ("conv_kernel_size", "selector_rank"))
        or found.has_tensor("attention_conv.base_kernel", *_CODEBOOKS)
    )


def resolve(found: Checkpoint, lookup: Lookup) -> DraftConfig:
    """Read a DFlash 2 draft; all four sizes of its parts must be stated."""
    return DraftConfig(**zlab.read_fields(found, lookup) | {key: lookup.integer(key) for key in _KEYS})


def canonical(name: str) -> str:
    """Codebooks are stored bare; a `.weight` behind them is another program's spelling."""
    bare = name.removesuffix(".weight")
    return bare if bare in _CODEBOOKS else zlab.canonical(name)


DIALECT = Dialect(name="dflash2", matches=matches, resolve=resolve, canonical=canonical, write=zlab.write_config)
