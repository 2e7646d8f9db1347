"""What an engine runs, resolved: which models in which versions, in which dtype, where, and how exactly.

One description for all backends, printed by the command line and kept in every record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash.core.draft_reader import DraftDescription, draft_sha256
from dflash.core.exactness import WidthClass

if TYPE_CHECKING:
    from dflash.resolve import Source


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What an engine runs."""

    target: str
    """As named by the user."""
    target_revision: str | None
    """Commit of a hub repository."""
    draft: str | None
    """None: plain decoding only."""
    draft_revision: str | None
    draft_sha256: str | None
    """Of the draft's weights file."""
    block_size: int | None
    """Slots of the draft's block, anchor included."""
    width: int | None
    """Most rows of a verify forward, where it was limited."""
    dtype: str
    """Of weights and activations, e.g. "bfloat16"."""
    device: str
    num_threads: int | None
    """CPU threads; None where the library chooses by itself."""
    exactness: WidthClass | None
    """What the load-time probe found; None if it was not asked for (exact=False)."""
    packs_single: bool = False
    """Whether plain steps that need not be exact run on weights packed for several rows, because a measurement at load
    found that faster: the form that speed-ups are divided by."""
    num_bigrams: int = 0
    """Pairs of tokens that were counted beside the draft."""

    @classmethod
    def of(
        cls,
        target: Source,
        draft: Source | None,
        description: DraftDescription | None,
        *,
        width: int | None,
        dtype: object,
        device: str,
        num_threads: int | None,
        exactness: WidthClass | None,
        packs_single: bool = False,
    ) -> EngineInfo:
        """What a backend's `load` has put together.

        Args:
            target, draft: as resolved; draft None = there is no model that drafts.
            description: of the draft; None where it is a language model.
            dtype: the library's own, whose name ends with ours ("torch.bfloat16").
        """
        return cls(
            target=target.name,
            target_revision=target.revision,
            draft=draft.name if draft else None,
            draft_revision=draft.revision if draft else None,
            draft_sha256=None if draft is None else draft_sha256(draft.path, description),
            block_size=description.config.block_size if description else None,
            width=width,
            dtype=str(dtype).rpartition(".")[2],
            device=device,
            num_threads=num_threads,
            exactness=exactness,
            packs_single=packs_single,
        )

    @property
    def exact(self) -> bool:
        """Whether plain and speculative decoding give the same bits here (False: not probed, or not possible)."""
        return self.exactness is not None and self.exactness.holds
