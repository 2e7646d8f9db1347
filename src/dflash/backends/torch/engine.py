"""The PyTorch engine: `load` opens a target and its draft once and puts the parts together.

Requests are `core/engine.py`, decoding is `core/loop.py`, the models' files are `loading.py`.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash.backends.torch.clock import synchronised_clock
from dflash.backends.torch.draft_loading import load_described
from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.drafters.block import BlockDrafter
from dflash.backends.torch.exactness import probe
from dflash.backends.torch.loading import (
    check_pair,
    check_width,
    choose_device,
    choose_dtype,
    end_of_sequence_ids,
    load_target,
    log_steps,
    set_threads,
)
from dflash.backends.torch.packing import pack_linears
from dflash.backends.torch.plain_form import packed_steps_are_faster
from dflash.backends.torch.sampling import TorchAcceptor
from dflash.backends.torch.target import TorchTarget
from dflash.cache import file_sha256
from dflash.core.draft_config import DraftConfig
from dflash.core.draft_reader import DraftDescription, read_draft
from dflash.core.engine import Engine, EngineInfo
from dflash.core.exactness import WidthClass
from dflash.core.loop import Clock
from dflash.core.pair_checks import TargetTokens, raw_config, token_findings, warn
from dflash.core.published import published_as
from dflash.registry import DRAFTERS, load_attribute
from dflash.resolve import AUTO, Progress, Source, resolve_draft, resolve_target
from dflash.types import SamplingParams

logger = logging.getLogger(__name__)

_PROBED_WIDTH = 16
"""Rows of the widest forward that the load-time probe covers; a wider block is probed at its own width."""


def load(
    target: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None = AUTO,
    *,
    dtype: str | None = None,
    device: str | None = None,
    num_threads: int | None = None,
    exact: bool = True,
    trust_remote_code: bool = False,
    width: int | None = None,
    progress: Progress | None = None,
) -> TorchEngine:
    """Open a target and a draft for generation.

    Args:
        target: hub id, local folder, GGUF file or built-in name.
        draft: the same; "auto" = the draft shipped for this target, None = plain decoding only.
        dtype: "float32", "bfloat16" or "float16"; None = bfloat16 where the device computes in it, else float32.
        device: "cpu", "cuda", "cuda:1" ...; None = a CUDA device if there is one.
        num_threads: CPU threads of PyTorch, process-wide; None = the physical cores this process may use, but not
            more than PyTorch is already limited to (OMP_NUM_THREADS).
        exact: probe for the width class in which plain and speculative decoding give the same bits, and decode in it.
        trust_remote_code: run Python code that comes with the target.
        width: most rows of a verify forward (anchor and width - 1 draft tokens), at most and by default the block.
        progress: told what is being done and how much of it is finished; without it, steps are logged.

    Raises:
        ModelError, MissingExtra, ConfigError: with the cure in the message; nothing stays loaded.
    """
    report = progress or log_steps(logger)
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    set_threads(num_threads)
    target_source = resolve_target(os.fspath(target), allow_code=trust_remote_code, progress=report)
    draft_source = None if draft is None else resolve_draft(os.fspath(draft), target_source, progress=report)
    # The draft's description is read first: a wrong one should not cost the loading of the target.
    description = None if draft_source is None else read_draft(draft_source.path)
    config = None if description is None else description.config
    if draft_source is not None and config is not None:
        _report_changes(draft_source, config)
    check_width(width, config)
    loaded = load_target(
        target_source,
        dtype=chosen_dtype,
        device=chosen_device,
        trust_remote_code=trust_remote_code,
        progress=report,
    )
    if draft_source is not None and config is not None:
        check_pair(config, loaded.model, draft_name=draft_source.name, target_name=target_source.name)
        tokens = TargetTokens.of_tokenizer(loaded.tokenizer, end_of_sequence_ids(loaded))
        warn(token_findings(config.mask_token_id, raw_config(draft_source.path), tokens))
    # Likewise the draft's weights before the probe.
    network = None
    if draft_source is not None and description is not None:
        network = _load_network(draft_source, description, loaded.model, report)
    report("packing weights", None)
    pack_linears(loaded.model)
    report("timing plain steps", None)
    packs_single = packed_steps_are_faster(loaded.model)
    exactness = _probe(loaded.model, 1 + config.max_proposal if config else 1, report) if exact else None
    shared = TorchTarget(
        loaded.model,
        taps=config.target_layer_ids if config else (),
        exact_width=exactness.width if exactness else 1,
        packs_single=packs_single,
    )
    drafter = None if network is None else load_attribute(DRAFTERS[network.config.kind])(network, shared)
    return TorchEngine(
        target=shared,
        drafter=drafter,
        tokenizer=loaded.tokenizer,
        eos_ids=end_of_sequence_ids(loaded),
        info=_info(target_source, draft_source, description, shared, exactness, width),
    )


class TorchEngine(Engine):
    """The engine over torch logits."""

    target: TorchTarget
    drafter: BlockDrafter | None
    tokenizer: PreTrainedTokenizerBase

    def acceptor(self, params: SamplingParams, prompt_ids: Sequence[int]) -> TorchAcceptor:
        return TorchAcceptor(params, prompt_ids, self.target.vocab_size, self.target.device)

    def profiling_clock(self) -> Clock:
        return synchronised_clock(self.target.device)


def _report_changes(source: Source, config: DraftConfig) -> None:
    """Warn where a published draft no longer says what it said: repositories change in place."""
    known = published_as(source.name)
    for difference in known.differences(config) if known is not None else ():
        logger.warning("draft '%s' is not as it was published: %s. Pin a revision (@...).", source.name, difference)


def _probe(model: Any, num_rows: int, report: Progress) -> WidthClass:
    report("checking bit-exactness", None)
    # The same widths with and without a draft, so that both settle on the same class. A block wider than that either
    # belongs to the class too, or makes the probe say that bit-exactness does not hold.
    found = probe(model, max_width=max(_PROBED_WIDTH, num_rows), block_size=num_rows)
    if not found.holds:
        logger.warning(
            "bit-exact decoding is not possible here: %s Near-ties may differ from plain decoding.", found.reason
        )
    return found


def _load_network(
    source: Source, description: DraftDescription, model: PreTrainedModel, report: Progress
) -> DraftModel:
    report(f"loading draft {source.name}", None)
    # float16 overflows in the feature fusion of real targets; the drafter casts at its border.
    dtype = torch.float32 if model.dtype == torch.float16 else model.dtype
    return load_described(description, model.device, dtype, name=source.name)


def _info(
    target: Source,
    draft: Source | None,
    description: DraftDescription | None,
    shared: TorchTarget,
    exactness: WidthClass | None,
    width: int | None,
) -> EngineInfo:
    return EngineInfo(
        target=target.name,
        target_revision=target.revision,
        draft=draft.name if draft else None,
        draft_revision=draft.revision if draft else None,
        draft_sha256=_weights_sha256(description) if description else None,
        block_size=description.config.block_size if description else None,
        width=width,
        dtype=str(shared.dtype).removeprefix("torch."),
        device=str(shared.device),
        num_threads=torch.get_num_threads(),
        exactness=exactness,
        packs_single=shared.packs_single,
    )


def _weights_sha256(description: DraftDescription) -> str:
    """Of the weights file; of the files' hashes in order where there are several."""
    hashes = [file_sha256(file) for file in sorted({tensor.file for tensor in description.tensors.values()})]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
