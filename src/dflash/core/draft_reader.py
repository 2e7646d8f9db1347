"""A draft folder in any dialect -> one resolved description, checked against the weights' headers; nothing is loaded.

Knows the order of the steps (find the dialect, resolve, rename, check, read the vocabulary); what each dialect says is
in `core/dialects/`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash.cache import files_sha256
from dflash.core.dialects.base import Checkpoint, Dialect, Lookup
from dflash.core.dialects.speculators import DRAFT_TO_TARGET, TARGET_TO_DRAFT
from dflash.core.draft_config import CONFIG_FILE, DraftConfig
from dflash.core.draft_tensors import check_tensors
from dflash.core.safetensors_files import StoredTensor, inside, read_integers, read_json, regular_size, stored_tensors
from dflash.errors import CheckpointError, ConfigError
from dflash.registry import DIALECTS, load_attribute

_BYTES_PER_ID = 24
"""Of a token id in a JSON list, spaces included."""
_LONGEST_SHOWN = 20
_EXPORT_AGAIN = "export the draft again."


@dataclass(frozen=True, kw_only=True)
class DraftDescription:
    """What a draft folder holds."""

    config: DraftConfig
    dialect: str
    """Name of the layout it is written in."""
    origins: Mapping[str, str]
    """Key -> where its value was read, or the rule it follows from."""
    notes: tuple[str, ...]
    """What was left out or overruled, in words."""
    tensors: Mapping[str, StoredTensor]
    """This project's tensor name -> where the tensor lies."""
    stored_names: Mapping[str, str]
    """This project's tensor name -> the name in its file."""
    vocabulary: tuple[int, ...] | None
    """Target ids that the draft scores, ascending (row j of its head stands for the j-th); None = all."""

    def for_target(self, num_layers: int) -> DraftDescription:
        """The same with taps that depend on the target's depth filled in. Raises PairError where there are none."""
        return dataclasses.replace(self, config=self.config.for_target(num_layers))

    def weights_sha256(self) -> str:
        """Of the weights file; of the files' hashes in order where there are several."""
        return files_sha256({tensor.file for tensor in self.tensors.values()})


def draft_sha256(folder: Path, description: DraftDescription | None) -> str:
    """Of a draft's weights; without a description (a language model that drafts) of all its safetensors files."""
    return files_sha256(folder.glob("*.safetensors")) if description is None else description.weights_sha256()


def read_draft(folder: Path) -> DraftDescription:
    """Read and check a draft folder.

    Raises CheckpointError for missing, unreadable or contradictory files and UnsupportedModel for drafts of another
    kind; the message names the key or tensor.
    """
    raw = _read_config(folder)
    stored = stored_tensors(folder)
    source = str(folder / CONFIG_FILE)
    found = Checkpoint(raw, source, {name: tensor.shape for name, tensor in stored.items()})
    dialect = find_dialect(found)
    names = _canonical_names(dialect, stored, source)
    skipped = {name: tensor for name, tensor in stored.items() if name not in names.values()}
    shapes = {name: stored[old].shape for name, old in names.items()}
    found = dataclasses.replace(found, shapes=shapes | {name: tensor.shape for name, tensor in skipped.items()})
    lookup = Lookup(source, dialect.levels(found))
    config = dialect.resolve(found, lookup)
    tensors = {name: stored[old] for name, old in names.items()}
    check_tensors(config, tensors, source=str(folder))
    return DraftDescription(
        config=config,
        dialect=dialect.name,
        origins=dict(lookup.origins),
        notes=tuple(lookup.notes),
        tensors=tensors,
        stored_names=names,
        vocabulary=_vocabulary(folder, config, skipped),
    )


def read_draft_config(folder: Path) -> DraftConfig:
    """The description from `config.json` alone: quick, and before the weights are there. Errors as `read_draft`."""
    return parse_draft_config(_read_config(folder), source=str(folder / CONFIG_FILE))


def parse_draft_config(raw: Mapping[str, Any], *, source: str) -> DraftConfig:
    """Resolve a parsed config.json; `source` names the file in messages. Errors as `read_draft`."""
    found = Checkpoint(raw, source)
    dialect = find_dialect(found)
    return dialect.resolve(found, Lookup(source, dialect.levels(found)))


def find_dialect(found: Checkpoint) -> Dialect:
    """The first dialect of the registry that recognises a checkpoint."""
    for reference in DIALECTS.values():
        dialect: Dialect = load_attribute(reference)
        if dialect.matches(found):
            return dialect
    raise AssertionError("the last dialect takes everything")


def dialect_named(name: str) -> Dialect:
    """A dialect that this project can write. Raises ConfigError for another name."""
    writable = []
    for known, reference in DIALECTS.items():
        dialect: Dialect = load_attribute(reference)
        if dialect.write is not None:
            writable.append(known)
            if known == name:
                return dialect
    raise ConfigError(f"layout '{name}' cannot be written; use one of {', '.join(sorted(writable))}.")


def read_draft_vocabulary(folder: Path, config: DraftConfig) -> tuple[int, ...] | None:
    """Target ids that the draft scores according to our own file beside the config, ascending, or None for all.

    Raises CheckpointError unless the file that the config names lists increasing ids of the target.
    """
    if config.draft_vocabulary_file is None:
        return None
    path = inside(folder, config.draft_vocabulary_file)
    if regular_size(path) > _BYTES_PER_ID * config.vocab_size:
        raise CheckpointError(f"{path} is larger than a list of {config.vocab_size} ids; {_EXPORT_AGAIN}")
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read the draft vocabulary {path} ({error}); {_EXPORT_AGAIN}") from error
    if not isinstance(ids, list):
        raise CheckpointError(f"{path} must hold a list of token ids, not a {type(ids).__name__}; {_EXPORT_AGAIN}")
    if (fault := _fault_of_ids(ids, config)) is not None:
        raise CheckpointError(f"{path}: {fault}; {_EXPORT_AGAIN}")
    return tuple(ids)


def _fault_of_ids(ids: Sequence[object], config: DraftConfig) -> str | None:
    """Why these are not the ids that the rows of a reduced head stand for, the first fault in words; None if they are:
    ascending ids of the target, another one beside the mask id."""
    if not ids:
        return "the list of token ids is empty"
    seen: set[int] = set()
    highest = -1
    for place, token in enumerate(ids):
        if type(token) is not int:
            return f"entry {place} is {str(token)[:_LONGEST_SHOWN]!r}, which is no whole number"
        if not 0 <= token < config.vocab_size:
            return f"entry {place} is {token}, outside the vocabulary (ids 0 to {config.vocab_size - 1})"
        if token in seen:
            return f"entry {place} is {token}, which stands in the list already"
        if token < highest:
            return f"entry {place} is {token}, below one before it: the ids must ascend"
        seen.add(token)
        highest = token
    if seen == {config.mask_token_id}:
        return f"{config.mask_token_id}, the mask id, is the only entry, and it is never proposed"
    return None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.exists() and not path.is_symlink():
        raise CheckpointError(f"{folder} has no {CONFIG_FILE}, so it is not a draft; give the draft's own folder.")
    return read_json(inside(folder, CONFIG_FILE), "draft's config")


def _canonical_names(dialect: Dialect, stored: Mapping[str, StoredTensor], source: str) -> dict[str, str]:
    names: dict[str, str] = {}
    for old in stored:
        name = dialect.canonical(old)
        if name is None:
            continue
        if name in names:
            raise CheckpointError(f"{source}: the weights hold {name} twice, as {names[name]} and as {old}.")
        names[name] = old
    return names


def _vocabulary(folder: Path, config: DraftConfig, skipped: Mapping[str, StoredTensor]) -> tuple[int, ...] | None:
    """From our own file, or from the table of offsets of a reduced head: row j stands for id j + d2t[j]."""
    if config.draft_vocab_size is None:
        full = skipped.get(DRAFT_TO_TARGET)
        if full is not None and read_integers(full).any():
            raise CheckpointError(
                f"{full.file}: {DRAFT_TO_TARGET} moves rows of a head that scores the whole vocabulary; config.json "
                "and weights do not belong together."
            )
        return read_draft_vocabulary(folder, config)
    offsets = read_integers(skipped[DRAFT_TO_TARGET])
    table = skipped[DRAFT_TO_TARGET].file
    if offsets.shape != (config.draft_vocab_size,):
        raise CheckpointError(
            f"{table}: {DRAFT_TO_TARGET} has the shape {list(offsets.shape)}, but the head has "
            f"{config.draft_vocab_size} rows; {_EXPORT_AGAIN}"
        )
    ids = np.arange(len(offsets)) + offsets
    if (fault := _fault_of_ids(ids.tolist(), config)) is not None:
        raise CheckpointError(
            f"{table}: {DRAFT_TO_TARGET} must turn row j into the id j + {DRAFT_TO_TARGET}[j], but of these ids "
            f"{fault}; {_EXPORT_AGAIN}"
        )
    kept = skipped.get(TARGET_TO_DRAFT)
    if kept is not None and not np.array_equal(np.flatnonzero(read_integers(kept)), ids):
        raise CheckpointError(f"{table}: {TARGET_TO_DRAFT} and {DRAFT_TO_TARGET} name different ids; export it again.")
    return tuple(ids.tolist())
