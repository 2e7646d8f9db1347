"""What a serving engine has to know of a draft: read from its config.json, or known beforehand.

Reads no weights. A draft on the hub is named, not downloaded: the engine fetches it itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash.core.dialects.base import Checkpoint, Lookup
from dflash.core.draft_config import CONFIG_FILE, DraftConfig
from dflash.core.draft_reader import find_dialect, read_draft
from dflash.core.safetensors_files import read_json
from dflash.errors import CheckpointError, UnsupportedModel

FULL, SLIDING = "full_attention", "sliding_attention"


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


def draft_in_folder(folder: Path) -> ServedDraft:
    """The facts of a draft on this machine, in any layout, its weights' names and shapes checked.

    Raises CheckpointError for a damaged draft. A draft that only an engine runs is read as far as its flags need.
    """
    location = str(folder.absolute())
    try:
        found = read_draft(folder)
    except UnsupportedModel:
        return by_signs(read_json(folder / CONFIG_FILE, "config"), location)
    return _facts(found.config, found.dialect, location, None)


def draft_by_config(raw: Mapping[str, Any], location: str, revision: str | None = None) -> ServedDraft:
    """The facts of a config.json whose weights are elsewhere; where a layout tells something by its tensors only, the
    words of the config have to do. Raises CheckpointError if it states no block."""
    found = Checkpoint(raw, f"the config.json of draft '{location}'")
    dialect = find_dialect(found)
    try:
        config = dialect.resolve(found, Lookup(found.source, dialect.levels(found)))
    except (UnsupportedModel, CheckpointError):
        return by_signs(raw, location, revision)
    return _facts(config, dialect.name, location, revision)


def _facts(config: DraftConfig, dialect: str, location: str, revision: str | None) -> ServedDraft:
    layers = [config.attention_of(number) for number in range(config.num_hidden_layers)]
    kind = "dspark" if config.anchor_predicts else config.kind  # DeepSpec's DFlash is a DSpark without its head
    return ServedDraft(
        location=location,
        revision=revision,
        kind=f"speculators-{kind}" if dialect.startswith("speculators") else kind,
        block_size=config.block_size,
        anchor_predicts=config.anchor_predicts,
        layer_types=tuple(FULL if layer.window is None else SLIDING for layer in layers),
        is_causal=all(layer.causal for layer in layers),
        target_layer_ids=config.target_layer_ids or None,
        num_target_layers=config.num_target_layers,
        hidden_size=config.target_hidden_size or config.hidden_size,
        vocab_size=config.vocab_size,
        own_draft_vocabulary=config.draft_vocabulary_file is not None,
    )


def by_signs(raw: Mapping[str, Any], location: str, revision: str | None = None) -> ServedDraft:
    """A draft that this package does not run (Domino, DSpine, ...), or cannot without its weights: family, block and
    windows by the words of the config alone."""
    nested = raw.get("dflash_config")
    levels = [level for level in (nested, raw) if isinstance(level, Mapping)]

    def find(key: str) -> Any:
        return next((level[key] for level in levels if level.get(key) is not None), None)

    block_size = find("block_size")
    if type(block_size) is not int or block_size < 2:
        raise CheckpointError(
            f"the config.json of draft '{location}' states block_size {block_size!r}; an engine has to be told how "
            "many tokens to propose, so add the value the draft was trained with."
        )
    kind = _family(raw, find)
    stated = next((find(key) for key in ("sample_from_anchor", "shift_label") if find(key) is not None), None)
    layers, taps = raw.get("layer_types"), find("target_layer_ids")
    return ServedDraft(
        location=location,
        revision=revision,
        kind=kind,
        block_size=block_size,
        anchor_predicts=kind == "dspark" if stated is None else bool(stated) and kind != "domino",
        layer_types=tuple(layers) if isinstance(layers, list) else None,
        target_layer_ids=tuple(taps) if isinstance(taps, list) else None,
        num_target_layers=find("num_target_layers"),
        vocab_size=raw.get("vocab_size"),
    )


def _family(raw: Mapping[str, Any], find: Callable[[str], Any]) -> str:
    if speculators := raw.get("speculators_model_type"):
        return f"speculators-{speculators}"
    if raw.get("dspine_config"):
        return "dspine"
    if find("projector_type"):
        return str(find("projector_type"))
    architectures = " ".join(raw.get("architectures") or [])
    if "DSpark" in architectures:
        return "dspark"
    return "dflash2" if "DFlash2" in architectures else "dflash"
