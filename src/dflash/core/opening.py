"""What an engine's `load` finds out before it reads any weights: whose files, which draft, how wide its rounds are.

One order for all backends: a wrong draft must not cost the loading of a target of gigabytes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from dataclasses import dataclass

from dflash import arguments
from dflash.core.autoregressive import CHAIN
from dflash.core.bigrams import Bigrams, read_bigrams
from dflash.core.draft_config import DraftConfig
from dflash.core.draft_reader import DraftDescription, read_draft
from dflash.core.drafting import engine_drafting
from dflash.core.engine_info import EngineInfo
from dflash.core.language_model import folder_is_language_model
from dflash.core.published import warn_of_changes
from dflash.errors import UnsupportedModel
from dflash.registry import MODEL_FREE_DRAFTERS
from dflash.resolve import Progress, Source, resolve_draft, resolve_target
from dflash.types import Drafting

Name = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Opening:
    """A pair whose files are found and whose draft is described."""

    target: Source
    draft: Source | None
    """Files of a draft; None = there is none, or it needs no model."""
    description: DraftDescription | None
    """Of a draft that reads the target's features; None where it is a language model."""
    bigrams: Bigrams | None
    """Counted beside the draft; None also where it has transitions of its own."""
    model_free: str | None
    """"module:attribute" of a drafter that needs no model."""
    draft_name: str | None
    """As the user named it; None = plain decoding only."""
    num_rows: int
    """Rows of the draft's block, the anchor's included; 1 without one."""
    drafting: Drafting
    """How requests draft unless they say otherwise, with the engine's width."""

    @property
    def config(self) -> DraftConfig | None:
        """Of a draft that reads the target's features."""
        return None if self.description is None else self.description.config

    @property
    def is_language_model(self) -> bool:
        """Whether the draft is a language model of its own."""
        return self.draft is not None and self.description is None

    def for_target(self, num_layers: int) -> Opening:
        """The same, with what the draft's files leave to the number of the target's layers."""
        if self.description is None:
            return self
        return dataclasses.replace(self, description=self.description.for_target(num_layers))

    def named(self, info: EngineInfo) -> EngineInfo:
        """`info` with what only the opening knows: the name of a drafter without files, the rows of one without a
        description, the counts beside one."""
        if self.model_free is not None:
            return dataclasses.replace(info, draft=self.draft_name)
        if self.bigrams is not None:
            return dataclasses.replace(info, num_bigrams=len(self.bigrams.pair_keys))
        return dataclasses.replace(info, block_size=self.num_rows) if self.is_language_model else info


def open_pair(
    target: Name,
    draft: Name | None,
    *,
    drafting: Drafting | None,
    width: int | None,
    trust_remote_code: bool,
    report: Progress,
    backend: str,
    kinds: Collection[str],
) -> Opening:
    """Find a pair's files and read the draft's description.

    Args:
        target, draft, drafting, width, trust_remote_code: of the backend's `load`, whatever their types.
        backend, kinds: its name and the kinds of drafts that it runs (keys of its table in `registry.py`).

    Raises ModelError for what is not found or cannot be read, UnsupportedModel for a draft of another kind,
    ConfigError for an argument of another type and for a width without effect.
    """
    arguments.check_instance("drafting", drafting, Drafting, optional=True)
    arguments.check_whole("width", width, optional=True)
    arguments.check_flag("trust_remote_code", trust_remote_code)
    target_source = resolve_target(arguments.path_of("target", target), allow_code=trust_remote_code, progress=report)
    draft_name = None if draft is None else arguments.path_of("draft", draft)
    model_free = MODEL_FREE_DRAFTERS.get(draft_name or "")
    source, description, bigrams, num_rows = None, None, None, 1
    if draft_name is not None and model_free is None:
        source = resolve_draft(draft_name, target_source, progress=report)
        if folder_is_language_model(source.path):
            num_rows += CHAIN
        else:
            description = _described(source, backend, kinds)
            if not description.config.has_transitions:
                bigrams = read_bigrams(source.path, description.config.vocab_size)
            num_rows += description.config.max_proposal
    chosen = engine_drafting(drafting, width, None if draft is None else num_rows, has_model=model_free is None)
    return Opening(
        target=target_source,
        draft=source,
        description=description,
        bigrams=bigrams,
        model_free=model_free,
        draft_name=draft_name,
        num_rows=num_rows,
        drafting=chosen,
    )


def check_options(*, dtype: object, device: object, num_threads: object, exact: object, progress: object) -> None:
    """Raise ConfigError for one of these arguments of a backend's `load` that is of another type."""
    arguments.check_word("dtype", dtype, optional=True)
    arguments.check_word("device", device, optional=True)
    arguments.check_whole("num_threads", num_threads, optional=True)
    arguments.check_flag("exact", exact)
    if progress is not None and not callable(progress):
        raise arguments.refuse("progress", "a function of (what is done, share finished) or None", progress)


def _described(source: Source, backend: str, kinds: Collection[str]) -> DraftDescription:
    description = read_draft(source.path)
    if description.config.kind not in kinds:
        raise UnsupportedModel(
            f"draft '{source.name}' is of kind {description.config.kind}, which the backend '{backend}' does not run "
            f"(it runs {', '.join(kinds)}); use another --backend."
        )
    warn_of_changes(source.name, description.config)
    return description
