"""The MLX engine: `load` opens a target and its draft once and puts the parts together.

Requests are `core/engine.py`, decoding is `core/loop.py`, the models' files are `loading.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from dflash.backends.mlx.calibration import device_of
from dflash.backends.mlx.compat import activation_dtype
from dflash.backends.mlx.draft_loading import load_described
from dflash.backends.mlx.exactness import probe
from dflash.backends.mlx.loading import (
    LoadedTarget,
    check_device,
    choose_dtype,
    device_name,
    end_of_sequence_ids,
    load_target,
)
from dflash.backends.mlx.sampling import MLXAcceptor
from dflash.backends.mlx.target import MLXTarget
from dflash.core.autoregressive import CHAIN
from dflash.core.calibration import Device, load_costs
from dflash.core.draft_reader import DraftDescription, read_draft
from dflash.core.drafting import SharedDrafter, engine_drafting
from dflash.core.engine import Engine
from dflash.core.engine_info import EngineInfo
from dflash.core.exactness import PROBED_WIDTH, WIDEST_ON_DEVICES, WidthClass
from dflash.core.language_model import check_same_tokens, folder_is_language_model
from dflash.core.loop import Clock
from dflash.core.memory import Memory
from dflash.core.pair import check_shapes
from dflash.core.pair_checks import TargetTokens, raw_config, token_findings, warn
from dflash.core.published import warn_of_changes
from dflash.errors import ConfigError, UnsupportedModel
from dflash.registry import MLX_DRAFTERS, MODEL_FREE_DRAFTERS, load_attribute
from dflash.resolve import AUTO, Progress, Source, log_steps, resolve_draft, resolve_target
from dflash.types import Drafting, SamplingParams

logger = logging.getLogger(__name__)

MakeDrafter = Callable[[MLXTarget], SharedDrafter]
"""From the target's weights side to that of a drafter for it."""


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
    drafting: Drafting | None = None,
    kv_bits: int | None = None,
    progress: Progress | None = None,
) -> MLXEngine:
    """Open a target and a draft for generation, as `dflash.load` does on PyTorch.

    Args:
        target: hub id, local folder (plain or quantised by mlx-lm), GGUF file or built-in name.
        draft: the same; "auto" = the draft shipped for this target, "ngram" = copies of earlier text only, without a
            model, None = plain decoding only. A language model with the target's tokenizer drafts, too.
        dtype: "float32", "bfloat16" or "float16", for what is not quantised; None = as stored on a GPU, float32
            on a CPU.
        device: MLX's default device, or None.
        num_threads: None: MLX chooses by itself.
        exact: probe for the width class in which plain and speculative decoding give the same bits, and decode in it.
        trust_remote_code: run Python code that comes with the target.
        width: most rows of a verify forward (anchor and width - 1 draft tokens); None = as many as pay, or the block
            where drafting is fixed.
        drafting: how requests draft unless they say otherwise; None = by measured cost.
        kv_bits: quantise the keys and values of full attention layers to 4 or 8 bits, in plain decoding as well.
        progress: told what is being done and how much of it is finished; without it, steps are logged.

    Raises:
        ModelError, ConfigError: with the cure in the message; nothing stays loaded.
    """
    report = progress or log_steps(logger)
    _check_options(num_threads, kv_bits)
    check_device(device)
    chosen_dtype = choose_dtype(dtype)
    target_source = resolve_target(os.fspath(target), allow_code=trust_remote_code, progress=report)
    draft_name = None if draft is None else os.fspath(draft)
    model_free = MODEL_FREE_DRAFTERS.get(draft_name or "")
    draft_source = None
    if draft_name is not None and model_free is None:
        draft_source = resolve_draft(draft_name, target_source, progress=report)
    # The draft's description is read first: a wrong one should not cost the loading of the target.
    is_model = draft_source is not None and folder_is_language_model(draft_source.path)
    description = None if draft_source is None or is_model else read_draft(draft_source.path)
    config = None if description is None else description.config
    if draft_source is not None and config is not None:
        if config.kind not in MLX_DRAFTERS:
            raise UnsupportedModel(
                f"draft '{draft_source.name}' is of kind {config.kind}, which the MLX backend does not run (it runs "
                f"{', '.join(MLX_DRAFTERS)}); use --backend torch."
            )
        warn_of_changes(draft_source.name, config)
    num_rows = 1 + (config.max_proposal if config else CHAIN if is_model else 0)
    chosen = engine_drafting(drafting, width, None if draft is None else num_rows, has_model=model_free is None)
    loaded = load_target(target_source, dtype=chosen_dtype, trust_remote_code=trust_remote_code, progress=report)
    # Likewise the draft's weights before the probe.
    make_drafter = None
    if draft_source is not None and description is not None:
        make_drafter = _load_draft(draft_source, description, loaded, target_source.name, report)
    elif draft_source is not None:
        make_drafter = _load_draft_model(draft_source, loaded, target_source.name, chosen_dtype, report)
    elif model_free is not None:
        make_drafter = _copies(model_free)
    exactness = _probe(loaded, num_rows, kv_bits, report) if exact else None
    shared = MLXTarget(
        loaded.model,
        max_length=loaded.max_length,
        taps=config.target_layer_ids if config else (),
        exact_width=exactness.width if exactness else 1,
        kv_bits=kv_bits,
    )
    drafter = None if make_drafter is None else make_drafter(shared)
    info = _info(target_source, draft_source, description, shared, exactness, chosen.width)
    info = info if model_free is None else dataclasses.replace(info, draft=draft_name)
    info = dataclasses.replace(info, block_size=num_rows) if is_model else info
    return _engine(loaded, shared, drafter, info, chosen, num_rows=num_rows, report=report)


def _engine(
    loaded: LoadedTarget,
    target: MLXTarget,
    drafter: SharedDrafter | None,
    info: EngineInfo,
    drafting: Drafting,
    *,
    num_rows: int,
    report: Progress,
) -> MLXEngine:
    """The engine, with the measured costs of this pair. `num_rows`: of the draft's block."""
    max_rows = _checked_rows(info.exactness, num_rows)
    memory = None
    if drafter is not None and not drafting.fixed:
        report("measuring costs", None)
        device = device_of(info, target.kv_bits)
        memory = Memory(load_costs(target, drafter, info, device, max_rows=max_rows))
    return MLXEngine(
        target=target,
        drafter=drafter,
        tokenizer=loaded.tokenizer,
        eos_ids=end_of_sequence_ids(loaded),
        info=info,
        drafting=drafting,
        memory=memory,
        max_rows=max_rows,
    )


class MLXEngine(Engine):
    """The engine over MLX logits."""

    backend = "mlx"
    target: MLXTarget

    def acceptor(self, params: SamplingParams, prompt_ids: Sequence[int]) -> MLXAcceptor:
        return MLXAcceptor(params, prompt_ids, self.target.vocab_size)

    def as_numpy(self, logits: mx.array) -> NDArray[np.float32]:
        return np.array(logits.astype(mx.float32))

    def device(self) -> Device:
        return device_of(self.info, self.target.kv_bits)

    def profiling_clock(self) -> Clock:
        def clock() -> float:
            mx.synchronize()
            return time.perf_counter()

        return clock


def _check_options(num_threads: int | None, kv_bits: int | None) -> None:
    if num_threads is not None:
        raise ConfigError("a number of threads has no effect on MLX, which chooses by itself; leave it out.")
    if kv_bits not in (None, 4, 8):
        raise ConfigError(f"kv_bits must be 4 or 8 (or left out), not {kv_bits}.")


def _checked_rows(exactness: WidthClass | None, num_rows: int) -> int:
    """Most rows of a verify forward: those of the probe, so that no bit changes; without one, as many as it would try,
    on a GPU more."""
    if exactness is not None and exactness.holds:
        return max(exactness.widths_tried)
    return max(PROBED_WIDTH if device_name() == "cpu" else WIDEST_ON_DEVICES, num_rows)


def _probe(loaded: LoadedTarget, num_rows: int, kv_bits: int | None, report: Progress) -> WidthClass:
    report("checking bit-exactness", None)
    found = probe(
        loaded.model,
        max_length=loaded.max_length,
        max_width=max(PROBED_WIDTH, num_rows),
        block_size=num_rows,
        kv_bits=kv_bits,
    )
    if not found.holds:
        logger.warning(
            "bit-exact decoding is not possible here: %s Near-ties may differ from plain decoding.", found.reason
        )
    return found


def _load_draft(
    source: Source, description: DraftDescription, target: LoadedTarget, target_name: str, report: Progress
) -> MakeDrafter:
    """Check a draft against its target and load its weights."""
    config = description.config
    shape = MLXTarget(target.model, max_length=target.max_length).shape
    check_shapes(config, shape, draft_name=source.name, target_name=target_name)
    tokens = TargetTokens.of_tokenizer(target.tokenizer, end_of_sequence_ids(target))
    warn(token_findings(config.mask_token_id, raw_config(source.path), tokens))
    report(f"loading draft {source.name}", None)
    # float16 overflows in the feature fusion of real targets; the drafter casts at its border.
    dtype = activation_dtype(target.model)
    network = load_described(description, mx.float32 if dtype == mx.float16 else dtype)
    return functools.partial(load_attribute(MLX_DRAFTERS[config.kind]), network)


def _load_draft_model(
    source: Source, target: LoadedTarget, target_name: str, dtype: mx.Dtype | None, report: Progress
) -> MakeDrafter:
    """A language model that drafts. Raises PairError unless its tokens are the target's."""
    loaded = load_target(source, dtype=dtype, progress=report, role="draft")
    check_same_tokens(
        loaded.tokenizer.get_vocab(), target.tokenizer.get_vocab(), draft_name=source.name, target_name=target_name
    )
    model = MLXTarget(loaded.model, max_length=loaded.max_length)
    return functools.partial(load_attribute(MLX_DRAFTERS["autoregressive"]), model)


def _copies(reference: str) -> MakeDrafter:
    """A drafter that needs no model, nor the target."""
    return lambda _target: load_attribute(reference)()


def _info(
    target: Source,
    draft: Source | None,
    description: DraftDescription | None,
    shared: MLXTarget,
    exactness: WidthClass | None,
    width: int | None,
) -> EngineInfo:
    return EngineInfo.of(
        target,
        draft,
        description,
        width=width,
        dtype=shared.dtype,
        device=f"mlx {device_name()}",
        num_threads=None,
        exactness=exactness,
    )
