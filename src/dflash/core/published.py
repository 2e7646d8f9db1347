"""Published drafts: which draft was trained for which target, and what its checkpoint is known to say.

Plain data, from the trainers' public files. A target that has an entry finds its draft by itself; what the downloaded
checkpoint says differently is reported, since repositories change in place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from dflash.core.draft_config import DraftConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PublishedDraft:
    """One draft on the hub. None = not known, and then not compared."""

    draft: str
    """Hub id."""
    target: str
    """Hub id of the target it was trained for."""
    kind: str
    """Drafter that runs it: dflash, dflash2, dspark or eagle3."""
    mask_token_id: int | None = None
    block_size: int | None = None
    target_layer_ids: tuple[int, ...] | None = None
    """Taps as outputs of layers."""
    anchor_predicts: bool = False
    mode: str | None = None
    """The kind of answers it was trained on, e.g. "non-thinking": with others it accepts less."""
    note: str | None = None

    def differences(self, config: DraftConfig) -> list[str]:
        """What a checkpoint says otherwise, in words."""
        known = {
            "kind": (self.kind, config.kind),
            "mask id": (self.mask_token_id, config.mask_token_id),
            "block size": (self.block_size, config.block_size),
            "taps": (self.target_layer_ids, config.target_layer_ids),
            "anchor slot that predicts": (self.anchor_predicts, config.anchor_predicts),
        }
        return [
            f"{what} {found} (published: {told})" for what, (told, found) in known.items() if told not in (None, found)
        ]


_TAPS_36 = (1, 9, 17, 25, 33)
_TAPS_64 = (1, 16, 31, 46, 61)
_QWEN3 = {"4B": ("4b", _TAPS_36), "8B": ("8b", _TAPS_36), "14B": ("14b", (1, 10, 19, 28, 37))}


def _deepspec() -> Iterator[PublishedDraft]:
    for kind in ("dspark", "dflash"):
        for size, (name, taps) in _QWEN3.items():
            yield PublishedDraft(
                draft=f"deepseek-ai/{kind}_qwen3_{name}_block7",
                target=f"Qwen/Qwen3-{size}",
                kind=kind,
                mask_token_id=151669,
                block_size=7,
                target_layer_ids=taps,
                anchor_predicts=True,
            )


PUBLISHED: tuple[PublishedDraft, ...] = (
    *(
        PublishedDraft(
            draft=f"z-lab/Qwen3-{size}-DFlash-b16",
            target=f"Qwen/Qwen3-{size}",
            kind="dflash",
            mask_token_id=151669,
            block_size=16,
            target_layer_ids=_TAPS_36,
            mode="non-thinking",
        )
        for size in ("4B", "8B")
    ),
    *_deepspec(),
    PublishedDraft(
        draft="z-lab/Qwen3.5-27B-DFlash",
        target="Qwen/Qwen3.5-27B",
        kind="dflash",
        block_size=16,
    ),
    PublishedDraft(
        draft="z-lab/Qwen3.6-27B-DFlash",
        target="Qwen/Qwen3.6-27B",
        kind="dflash",
        mask_token_id=248070,
        block_size=16,
        target_layer_ids=_TAPS_64,
    ),
    PublishedDraft(
        draft="z-lab/Qwen3.6-35B-A3B-DFlash",
        target="Qwen/Qwen3.6-35B-A3B",
        kind="dflash",
        mask_token_id=248070,
        block_size=16,
    ),
    PublishedDraft(
        draft="z-lab/Qwen3.8-27B-DFlash2",
        target="Qwen/Qwen3.8-27B",
        kind="dflash2",
        mask_token_id=248070,
        block_size=8,
        target_layer_ids=(5, 19, 33, 47, 61),
    ),
    PublishedDraft(
        draft="z-lab/Qwen3.5-122B-A10B-DFlash",
        target="Qwen/Qwen3.5-122B-A10B",
        kind="dflash",
        mask_token_id=248070,
        note="changed in place (4 layers and 6 taps, later 6 and 8): pin the revision",
    ),
    PublishedDraft(
        draft="z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        target="meta-llama/Llama-3.1-8B-Instruct",
        kind="dflash",
        mask_token_id=128002,
        block_size=10,
    ),
    PublishedDraft(
        draft="z-lab/gpt-oss-120b-DFlash",
        target="openai/gpt-oss-120b",
        kind="dflash",
        block_size=10,
        target_layer_ids=_TAPS_36,
    ),
    PublishedDraft(
        draft="z-lab/gemma-4-31B-it-DFlash",
        target="google/gemma-4-31B-it",
        kind="dflash",
        mask_token_id=4,
        block_size=16,
        target_layer_ids=(1, 12, 23, 35, 46, 57),
    ),
    PublishedDraft(
        draft="z-lab/Kimi-K2.5-DFlash",
        target="moonshotai/Kimi-K2.5",
        kind="dflash",
        mask_token_id=163838,
        block_size=8,
        target_layer_ids=(1, 12, 24, 35, 47, 58),
    ),
    PublishedDraft(
        draft="meta-models/Muse-Glimmer-30B-assistant",
        target="meta-models/Muse-Glimmer-30B",
        kind="dflash",
        target_layer_ids=(1, 13, 25, 37, 49),
    ),
    PublishedDraft(draft="RedHatAI/Qwen3-8B-speculator.eagle3", target="Qwen/Qwen3-8B", kind="eagle3"),
    PublishedDraft(
        draft="RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
        target="meta-llama/Llama-3.1-8B-Instruct",
        kind="eagle3",
    ),
)
"""In the order of preference: the first one of a target is used when the user names no draft."""


def published_for(target: str) -> PublishedDraft | None:
    """The draft that a target's hub id ("owner/name", a revision left out) finds by itself; None if there is none."""
    name = target.partition("@")[0].lower()
    return next((entry for entry in PUBLISHED if entry.target.lower() == name), None)


def published_as(draft: str) -> PublishedDraft | None:
    """The entry of a draft's own hub id."""
    name = draft.partition("@")[0].lower()
    return next((entry for entry in PUBLISHED if entry.draft.lower() == name), None)


def warn_of_changes(draft: str, config: DraftConfig) -> None:
    """Log where a published draft no longer says what it said."""
    known = published_as(draft)
    for difference in known.differences(config) if known is not None else ():
        logger.warning("draft '%s' is not as it was published: %s. Pin a revision (@...).", draft, difference)
