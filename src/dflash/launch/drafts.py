"""What a serving engine has to know of a draft: read from its config.json, or known beforehand.

Reads no weights. A draft on the hub is named, not downloaded: the engine fetches it itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash.errors import CheckpointError

SLIDING = "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class ServedDraft:
    """The facts that an engine's flags and refusals depend on."""

    location: str
    """Hub id or absolute path, as the engine is given it."""
    revision: str | None = None
    kind: str = "dflash"
    """dflash, dflash2, dspark, domino, dspine, ...: which network and which heads."""
    block_size: int
    """B: slots per block, anchor slot included."""
    anchor_predicts: bool = False
    """Whether the anchor slot proposes as well: B proposals per block instead of B - 1."""
    layer_types: tuple[str, ...] | None = None
    """"full_attention" or "sliding_attention" per draft layer; None = not stated, which means all full."""
    is_causal: bool | None = None
    """In-block causality where the config states it for all layers."""
    target_layer_ids: tuple[int, ...] | None = None
    """Taps: z = output of the target's layer z. None = not known without the draft's files."""
    num_target_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    own_draft_vocabulary: bool = False
    """This project's extension: the draft scores part of the vocabulary. Engines score all of it."""

    @property
    def num_proposals(self) -> int:
        """Tokens that a block proposes."""
        return self.block_size if self.anchor_predicts else self.block_size - 1

    @property
    def has_mixed_windows(self) -> bool:
        """Whether some layers slide and others do not: two kinds of key/value cache in one draft."""
        return self.layer_types is not None and 0 < self.layer_types.count(SLIDING) < len(self.layer_types)

    @property
    def all_sliding(self) -> bool:
        """Whether every layer has a sliding window."""
        return bool(self.layer_types) and set(self.layer_types or ()) == {SLIDING}

    def at(self, location: str, revision: str | None = None) -> ServedDraft:
        """The same draft under another name (a local copy, a revision)."""
        return replace(self, location=location, revision=revision)


def read_served_draft(raw: Mapping[str, Any], location: str, *, revision: str | None = None) -> ServedDraft:
    """The facts of a parsed config.json. Raises CheckpointError if what every engine needs is missing."""
    nested = raw.get("dflash_config")
    inner: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}

    def find(key: str) -> Any:
        return inner[key] if inner.get(key) is not None else raw.get(key)

    kind = _kind(raw, find)
    block_size = find("block_size")
    if type(block_size) is not int or block_size < 2:
        raise CheckpointError(
            f"the config.json of draft '{location}' states block_size {block_size!r}; an engine has to be told how "
            "many tokens to propose, so add the value the draft was trained with."
        )
    taps = find("target_layer_ids")
    layers = raw.get("layer_types")
    causal = raw.get("is_causal")
    return ServedDraft(
        location=location,
        revision=revision,
        kind=kind,
        block_size=block_size,
        anchor_predicts=_anchor_predicts(kind, find),
        layer_types=tuple(layers) if isinstance(layers, list) else None,
        is_causal=causal if isinstance(causal, bool) else None,
        target_layer_ids=tuple(taps) if isinstance(taps, list) else None,
        num_target_layers=find("num_target_layers"),
        hidden_size=raw.get("target_hidden_size") or raw.get("hidden_size"),
        vocab_size=raw.get("vocab_size"),
        own_draft_vocabulary=find("draft_vocabulary_file") is not None,
    )


def _kind(raw: Mapping[str, Any], find: Any) -> str:
    """The family of heads, by the signs that published configs carry."""
    architectures = raw.get("architectures") or []
    if raw.get("speculators_config") or raw.get("speculators_model_type"):
        return f"speculators-{raw.get('speculators_model_type') or 'unknown'}"
    if raw.get("dspine_config"):
        return "dspine"
    projector = find("projector_type")
    if projector in ("dspark", "domino"):
        return str(projector)
    if find("markov_rank") is not None or any("DSpark" in name for name in architectures):
        return "dspark"
    if find("selector_rank") or find("conv_kernel_size") or "DFlash2DraftModel" in architectures:
        return "dflash2"
    return "dflash"


def _anchor_predicts(kind: str, find: Any) -> bool:
    for key in ("sample_from_anchor", "shift_label"):
        if find(key) is not None:
            return bool(find(key))
    return kind == "dspark"
