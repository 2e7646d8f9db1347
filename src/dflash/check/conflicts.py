"""Every contradiction that a draft's config.json holds, not only the first: read from the JSON, before any reader.

The reader (`core/draft_reader.py`) stops at the first conflict; here all of them are listed, so that a broken export is
mended in one go. Knows which keys are written twice in the wild and in which convention, and which file has no effect
beside which draft; resolves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflash.core.bigrams import BIGRAMS_FILE
from dflash.core.draft_config import DraftConfig
from dflash.core.findings import Finding

NESTED = "dflash_config"
SHIFTED_TAPS = "eagle_aux_hidden_state_layer_ids"
_LEVELS_MAY_DIFFER = frozenset({"architectures", "model_type", "dtype", "torch_dtype"})


def config_conflicts(raw: Mapping[str, Any]) -> list[Finding]:
    """All values of a parsed config.json that contradict one another."""
    return [Finding("error", subject, message) for subject, message in _conflicts(raw)]


def code_note(raw: Mapping[str, Any]) -> list[Finding]:
    """A note if the checkpoint names code of its own, which is never run unless the user asks for it."""
    if not raw.get("auto_map"):
        return []
    return [Finding("note", "code", "the checkpoint names Python code of its own (auto_map); it was not run.")]


def idle_counts(folder: Path, config: DraftConfig) -> list[Finding]:
    """A note if counts of neighbours lie beside a draft that has no use for them."""
    if not (config.has_transitions and (folder / BIGRAMS_FILE).exists()):
        return []
    message = f"the draft says itself which tokens follow one another, so {BIGRAMS_FILE} is never read; remove it."
    return [Finding("note", "bigrams", message)]


def _conflicts(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    nested = raw.get(NESTED)
    inner: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}
    for key in sorted(inner.keys() & raw.keys() - _LEVELS_MAY_DIFFER):
        if None not in (inner[key], raw[key]) and inner[key] != raw[key]:
            yield key, f"{key} is {inner[key]} in {NESTED} and {raw[key]} at the top level; keep the trained one."
    taps = inner.get("target_layer_ids", raw.get("target_layer_ids"))
    shifted = inner.get(SHIFTED_TAPS, raw.get(SHIFTED_TAPS))
    if isinstance(taps, list) and isinstance(shifted, list) and not _is_shifted(taps, shifted):
        yield "taps", f"{SHIFTED_TAPS} {shifted} is not target_layer_ids {taps} plus one; keep the trained list."
    thetas = dict(_thetas(raw))
    whole = {value for place, value in thetas.items() if "." not in place}
    by_kind = set(thetas.values()) - whole if len(whole) == 1 else set()
    if len(whole) > 1 or (by_kind and not whole & {value for place, value in thetas.items() if "." in place}):
        shown = ", ".join(f"{value:g} in {place}" for place, value in thetas.items())
        yield "rope", f"rope_theta is stated differently: {shown}; keep the one the draft was trained with."
    layers, kinds = raw.get("num_hidden_layers"), raw.get("layer_types")
    if isinstance(kinds, list) and isinstance(layers, int) and len(kinds) != layers:
        yield "layers", f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}; correct one of them."


def _is_shifted(taps: list[Any], shifted: list[Any]) -> bool:
    """Whether `shifted` is `taps` in the numbering that counts from the embedding; a last entry for the final state may
    stand behind them."""
    wanted = [tap + 1 if isinstance(tap, int) else None for tap in taps]
    return shifted[: len(wanted)] == wanted


def _thetas(raw: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(place, value) of every rope_theta; a place with a dot belongs to one layer type."""
    if isinstance(raw.get("rope_theta"), int | float):
        yield "rope_theta", float(raw["rope_theta"])
    for key in ("rope_parameters", "rope_scaling"):
        level = raw.get(key)
        if not isinstance(level, Mapping):
            continue
        if isinstance(level.get("rope_theta"), int | float):
            yield key, float(level["rope_theta"])
        for kind, part in level.items():
            if isinstance(part, Mapping) and isinstance(part.get("rope_theta"), int | float):
                yield f"{key}.{kind}", float(part["rope_theta"])
