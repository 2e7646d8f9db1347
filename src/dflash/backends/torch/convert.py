"""A draft from one checkpoint layout into another: the same tensors under other names, byte for byte.

What a layout leaves out is taken out only if it is a copy of the target's own (embedding and head), and what it needs
is taken from there. The written folder is read back and must describe the same draft.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash.backends.torch.loading import open_target
from dflash.core.bigrams import BIGRAMS_FILE
from dflash.core.dialects.base import Dialect
from dflash.core.dialects.speculators import DRAFT_TO_TARGET, TARGET_TO_DRAFT
from dflash.core.draft_config import CONFIG_FILE, WEIGHTS_FILE, DraftConfig
from dflash.core.draft_reader import DraftDescription, dialect_named, read_draft
from dflash.core.safetensors_files import inside
from dflash.errors import ConfigError, UnsupportedModel

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
VOCABULARY_FILE = "draft_vocabulary.json"
OpenTables = Callable[[], tuple[Tensor, Tensor]]
"""Embedding and head [V, H] of the target, in any type; called only if they are needed."""


@dataclass(frozen=True)
class Converted:
    """What was written."""

    folder: Path
    source_layout: str
    layout: str
    config: DraftConfig
    dropped: tuple[str, ...]
    """Tensors left out, which the target has."""
    added: tuple[str, ...]
    """Tensors taken from the target."""


@dataclass
class _Draft:
    config: DraftConfig
    tensors: dict[str, Tensor]
    vocabulary: tuple[int, ...] | None


def convert_draft(source: Path, out: Path, layout: str, *, target: str | None = None) -> Converted:
    """Write the draft folder `source` into the new folder `out` in another layout.

    Args:
        layout: "z-lab" (DFlash and DFlash 2), "speculators" (DFlash and DSpark) or "transformers" (DFlash).
        target: the draft's target, as in `dflash.load`; needed where embedding or head come from or go to it.

    Raises:
        ConfigError: unknown layout, a folder that is not empty, or a target that is needed and not given.
        UnsupportedModel: the layout cannot say what this draft has.
        CheckpointError, ModelError: source or target cannot be read.
    """
    dialect = dialect_named(layout)
    assert dialect.write is not None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty; name a new folder, or remove it first.")
    description = read_draft(source)
    counts = inside(source, BIGRAMS_FILE)
    draft = _Draft(description.config, stored_values(description), description.vocabulary)
    before = set(draft.tensors)
    tables = _Tables(target)
    if layout == "speculators":
        _to_speculators(draft, tables, layout)
    else:
        _to_borrowing(draft, tables, dialect)
    config = draft.config
    written = {dialect.stored(name): tensor for name, tensor in draft.tensors.items()}
    written |= _tables_of(draft) if config.draft_vocab_size is not None else {}
    raw = dialect.write(config) | {"dtype": str(draft.tensors["fc.weight"].dtype).removeprefix("torch.")}
    partial = out.parent / f".{out.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(written, partial / WEIGHTS_FILE, metadata={"format": "pt"})
    (partial / CONFIG_FILE).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    if config.draft_vocabulary_file is not None:
        (partial / config.draft_vocabulary_file).write_text(json.dumps(list(draft.vocabulary or ())), encoding="utf-8")
    if counts.is_file():
        shutil.copyfile(counts, partial / BIGRAMS_FILE)
    back = read_draft(partial)
    assert (back.config, back.vocabulary) == (config, draft.vocabulary), "what was written must read back"
    if out.exists():
        out.rmdir()
    partial.rename(out)
    after = set(draft.tensors)
    return Converted(
        out, description.dialect, layout, config, tuple(sorted(before - after)), tuple(sorted(after - before))
    )


def stored_values(description: DraftDescription) -> dict[str, Tensor]:
    """All tensors by this project's names, in the type they are stored in."""
    values: dict[str, Tensor] = {}
    for file in {tensor.file for tensor in description.tensors.values()}:
        with safe_open(file, framework="pt") as opened:
            for name, tensor in description.tensors.items():
                if tensor.file == file:
                    values[name] = opened.get_tensor(description.stored_names[name])
    return values


class _Tables:
    """Embedding and head of the target, loaded when first asked for."""

    def __init__(self, target: str | None) -> None:
        self._target = target
        self._tables: dict[str, Tensor] | None = None

    def get(self, name: str, why: str) -> Tensor:
        """`embed_tokens.weight` or `lm_head.weight`, [V, H]."""
        if self._target is None:
            raise ConfigError(f"{why}; name the target (--target).")
        if self._tables is None:
            model = open_target(self._target, dtype="float32", device="cpu").model
            embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
            self._tables = {EMBEDDING: _weight(embedding), HEAD: _weight(head)}
        return self._tables[name]


def _weight(module: object) -> Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise UnsupportedModel("the target has no embedding or head of the usual form, so nothing can be compared.")
    return weight.detach()


def _to_borrowing(draft: _Draft, tables: _Tables, dialect: Dialect) -> None:
    """z-lab's and Transformers' layouts use the target's embedding and head."""
    config = draft.config
    reduced = config.draft_vocab_size is not None
    draft.config = dataclasses.replace(
        config,
        owns_embedding=False,
        owns_head=False,
        draft_vocab_size=None,
        draft_vocabulary_file=VOCABULARY_FILE if reduced else config.draft_vocabulary_file,
    )
    assert dialect.write is not None
    dialect.write(draft.config)  # a draft that it cannot say is refused before the target is loaded
    for name, owned in ((EMBEDDING, config.owns_embedding), (HEAD, config.owns_head)):
        if not owned:
            continue
        own = draft.tensors[name]
        theirs = tables.get(
            name, f"the draft has its own {name}, which {dialect.name} leaves out if it is the target's"
        )
        if name == HEAD and draft.vocabulary is not None:
            theirs = theirs[list(draft.vocabulary)]
        if own.shape != theirs.shape or not torch.equal(own, theirs.to(own.dtype)):
            raise UnsupportedModel(
                f"the draft's own {name} is not the target's, and the layout {dialect.name} has no place for it; only "
                "speculators has."
            )
        del draft.tensors[name]


def _to_speculators(draft: _Draft, tables: _Tables, layout: str) -> None:
    """A reduced vocabulary becomes a head of its own with a table; everything else stays."""
    config = draft.config
    if config.draft_vocabulary_file is None or draft.vocabulary is None:
        return
    if config.owns_head:
        raise UnsupportedModel(f"a list of ids beside an own head cannot be written as {layout}.")
    why = "the draft scores a part of the vocabulary, whose rows of the target's head belong into the file"
    head = tables.get(HEAD, why)
    rows = head[list(draft.vocabulary)].to(draft.tensors["fc.weight"].dtype)
    draft.tensors[HEAD] = rows.contiguous()
    draft.config = dataclasses.replace(
        config, draft_vocabulary_file=None, owns_head=True, draft_vocab_size=len(draft.vocabulary)
    )


def _tables_of(draft: _Draft) -> dict[str, Tensor]:
    """d2t: offsets from a row to its id; t2d: which ids have a row."""
    assert draft.vocabulary is not None
    ids = torch.tensor(draft.vocabulary)
    kept = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
    kept[ids] = True
    return {DRAFT_TO_TARGET: ids - torch.arange(len(ids)), TARGET_TO_DRAFT: kept}
