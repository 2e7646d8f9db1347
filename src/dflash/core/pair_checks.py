"""Cheap checks of a draft against its target that a shape cannot show: which tokens mean something special to either.

Everything here costs microseconds and runs at every load; what needs forwards is `dflash check`'s business. Knows ids
and names only, no models. Shapes, taps and tensors are checked where they are read and refused there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash import arguments
from dflash.core.draft_config import CONFIG_FILE
from dflash.core.findings import Finding
from dflash.core.safetensors_files import read_json
from dflash.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, kw_only=True)
class TargetTokens:
    """The target's special tokens."""

    eos_ids: Collection[int]
    """All ids that end its answers."""
    bos_id: int | None = None
    pad_id: int | None = None

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, eos_ids: Collection[int]) -> TargetTokens:
        """Those of a Transformers tokenizer, with the end tokens of the generation config."""
        return cls(eos_ids=eos_ids, bos_id=tokenizer.bos_token_id, pad_id=tokenizer.pad_token_id)

    def of(self, key: str) -> set[int]:
        """The ids that a configuration would give under `key` (one of SPECIAL_IDS)."""
        if key == "eos_token_id":
            return set(self.eos_ids)
        found = self.bos_id if key == "bos_token_id" else self.pad_id
        return set() if found is None else {found}


def end_ids(named: Iterable[object], target_name: str) -> frozenset[int]:
    """The end-of-sequence ids of a target: those of the first place that names any, an id or a list of ids.

    Raises CheckpointError for what are no ids.
    """
    found = next((ids for ids in named if ids is not None), ())
    ids = [found] if arguments.is_whole(found) else found
    try:
        arguments.check_token_ids("eos_token_id", ids)
    except ConfigError as error:
        raise CheckpointError(
            f"the configuration of '{target_name}' names no end of its answers ({error}) Mend eos_token_id in its "
            "generation_config.json, or download it again."
        ) from error
    assert isinstance(ids, Iterable)
    return frozenset(int(token) for token in ids)


def token_findings(mask_token_id: int, raw_config: Mapping[str, Any], tokens: TargetTokens) -> list[Finding]:
    """Warnings about the mask id and about special ids in the draft's config.json that are not the target's.

    A draft's config is often a copy of its target's, so other special ids mean another target or another tokenizer.
    """
    findings = []
    if mask_token_id in tokens.eos_ids:
        findings.append(
            Finding(
                "warning",
                "mask id",
                f"mask id {mask_token_id} also ends the target's answers: the draft can never propose the end, and a "
                "text that holds the token looks masked to it; train with an id that the target never says.",
            )
        )
    elif mask_token_id in {tokens.bos_id, tokens.pad_id}:
        findings.append(
            Finding(
                "note",
                "mask id",
                f"mask id {mask_token_id} is the target's {'bos' if mask_token_id == tokens.bos_id else 'pad'} token; "
                "harmless unless prompts hold it.",
            )
        )
    for key in SPECIAL_IDS:
        theirs, ours = _ids(raw_config.get(key)), tokens.of(key)
        if theirs and ours and not theirs & ours:
            findings.append(
                Finding(
                    "warning",
                    "special ids",
                    f"the draft's config.json gives {key} {sorted(theirs)}, the target's is {sorted(ours)}: it may "
                    "have been made for another target or tokenizer; the acceptance that `dflash check` measures shows "
                    "whether it fits.",
                )
            )
    return findings


def warn(findings: list[Finding]) -> None:
    """Log warnings, as loading does."""
    for finding in findings:
        if finding.severity == "warning":
            logger.warning("%s", finding.message)


def raw_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a draft, or {} where there is none that can be read: the reader says what is wrong."""
    try:
        return read_json(folder / CONFIG_FILE, "draft's config") if (folder / CONFIG_FILE).is_file() else {}
    except CheckpointError:
        return {}


def _ids(value: object) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {one for one in values if isinstance(one, int) and not isinstance(one, bool)}
