"""The MLX engine: `load` opens a target and its draft once and puts the parts together.

Requests are `core/engine.py`, decoding is `core/loop.py`, the models' files are `loading.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from dflash.backends.mlx.compat import activation_dtype
from dflash.backends.mlx.draft_loading import load_described
from dflash.backends.mlx.drafters.block import BlockDrafter
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
from dflash.core.draft_config import DraftConfig
from dflash.core.draft_reader import DraftDescription, read_draft
from dflash.core.engine import Engine, EngineInfo
from dflash.core.exactness import PROBED_WIDTH, WidthClass
from dflash.core.loop import Clock
from dflash.core.pair import check_shapes, check_width
from dflash.errors import ConfigError
from dflash.registry import MLX_DRAFTERS, load_attribute
from dflash.resolve import AUTO, Progress, Source, log_steps, resolve_draft, resolve_target
from dflash.types import Drafting, SamplingParams

logger = logging.getLogger(__name__)


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
        draft: the same; "auto" = the draft shipped for this target, None = plain decoding only.
        dtype: "float32", "bfloat16" or "float16", for what is not quantised; None = as stored on a GPU, float32
            on a CPU.
        device: MLX's default device, or None.
        num_threads: None: MLX chooses by itself.
        exact: probe for the width class in which plain and speculative decoding give the same bits, and decode in it.
        trust_remote_code: run Python code that comes with the target.
        width: most rows of a verify forward (anchor and width - 1 draft tokens); None = the draft's block.
        drafting: how requests draft unless they say otherwise; None = the whole block in every round.
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
    draft_source = None if draft is None else resolve_draft(os.fspath(draft), target_source, progress=report)
    # The draft's description is read first: a wrong one should not cost the loading of the target.
    description = None if draft_source is None else read_draft(draft_source.path)
    config = None if description is None else description.config
    chosen = _drafting(drafting, width, config)
    loaded = load_target(target_source, dtype=chosen_dtype, trust_remote_code=trust_remote_code, progress=report)
    shape = MLXTarget(loaded.model, max_length=loaded.max_length).shape
    if draft_source is not None and config is not None:
        check_shapes(config, shape, draft_name=draft_source.name, target_name=target_source.name)
    # Likewise the draft's weights before the probe.
    network = None
    if draft_source is not None and description is not None:
        report(f"loading draft {draft_source.name}", None)
        network = load_described(description, _draft_dtype(loaded.model))
    exactness = _probe(loaded, 1 + config.max_proposal if config else 1, kv_bits, report) if exact else None
    shared = MLXTarget(
        loaded.model,
        max_length=loaded.max_length,
        taps=config.target_layer_ids if config else (),
        exact_width=exactness.width if exactness else 1,
        kv_bits=kv_bits,
    )
    drafter = None if network is None else load_attribute(MLX_DRAFTERS[network.config.kind])(network, shared)
    return MLXEngine(
        target=shared,
        drafter=drafter,
        tokenizer=loaded.tokenizer,
        eos_ids=end_of_sequence_ids(loaded),
        info=_info(target_source, draft_source, description, shared, exactness, chosen.width),
        drafting=chosen,
        max_rows=max(PROBED_WIDTH, 1 + config.max_proposal if config else 1),
    )


class MLXEngine(Engine):
    """The engine over MLX logits."""

    target: MLXTarget
    drafter: BlockDrafter | None

    def acceptor(self, params: SamplingParams, prompt_ids: Sequence[int]) -> MLXAcceptor:
        return MLXAcceptor(params, prompt_ids, self.target.vocab_size)

    def as_numpy(self, logits: mx.array) -> NDArray[np.float32]:
        return np.array(logits.astype(mx.float32))

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


def _drafting(drafting: Drafting | None, width: int | None, config: DraftConfig | None) -> Drafting:
    chosen = drafting or Drafting(fixed=True)
    chosen = dataclasses.replace(chosen, width=chosen.width if width is None else width)
    num_rows = None if config is None else 1 + config.max_proposal
    check_width(chosen.width, num_rows if num_rows is None or chosen.fixed else max(PROBED_WIDTH, num_rows))
    return chosen


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


def _draft_dtype(model: nn.Module) -> mx.Dtype:
    """float16 overflows in the feature fusion of real targets; the drafter casts at its border."""
    dtype = activation_dtype(model)
    return mx.float32 if dtype == mx.float16 else dtype


def _info(
    target: Source,
    draft: Source | None,
    description: DraftDescription | None,
    shared: MLXTarget,
    exactness: WidthClass | None,
    width: int | None,
) -> EngineInfo:
    return EngineInfo(
        target=target.name,
        target_revision=target.revision,
        draft=draft.name if draft else None,
        draft_revision=draft.revision if draft else None,
        draft_sha256=description.weights_sha256() if description else None,
        block_size=description.config.block_size if description else None,
        width=width,
        dtype=str(shared.dtype).removeprefix("mlx.core."),
        device=f"mlx {device_name()}",
        num_threads=None,
        exactness=exactness,
    )
