"""The MLX engine: `load` opens a target and its draft once and puts the parts together.

Requests are `core/engine.py`, decoding is `core/loop.py`, the models' files are `loading.py`.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from dflash.backends.mlx.calibration import device_of
from dflash.backends.mlx.compat import activation_dtype, decoder_layers
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
from dflash.core.calibration import Device, load_costs
from dflash.core.draft_reader import DraftDescription
from dflash.core.drafting import SharedDrafter
from dflash.core.eagle3_config import tap_findings
from dflash.core.engine import Engine
from dflash.core.engine_info import EngineInfo
from dflash.core.exactness import PROBED_WIDTH, WIDEST_ON_DEVICES, WidthClass
from dflash.core.key_lengths import BUCKETS
from dflash.core.language_model import check_same_tokens
from dflash.core.memory import Memory
from dflash.core.opening import Opening, check_options, open_pair
from dflash.core.pair import check_shapes
from dflash.core.pair_checks import TargetTokens, raw_config, token_findings, warn
from dflash.errors import ConfigError
from dflash.registry import MLX_DRAFTERS, load_attribute
from dflash.resolve import AUTO, Progress, Source, log_steps
from dflash.types import Clock, Drafting, SamplingParams

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
    check_options(dtype=dtype, device=device, num_threads=num_threads, exact=exact, progress=progress)
    report = progress or log_steps(logger)
    _check_options(num_threads, kv_bits)
    check_device(device)
    chosen_dtype = choose_dtype(dtype)
    pair = open_pair(
        target,
        draft,
        drafting=drafting,
        width=width,
        trust_remote_code=trust_remote_code,
        report=report,
        backend=MLXEngine.backend,
        kinds=MLX_DRAFTERS,
    )
    loaded = load_target(pair.target, dtype=chosen_dtype, trust_remote_code=trust_remote_code, progress=report)
    pair = pair.for_target(len(decoder_layers(loaded.model)))
    with ExitStack() as opened:
        # The draft's weights before the probe: wrong ones should not cost its time.
        make_drafter = _make_drafter(pair, loaded, chosen_dtype, report, opened)
        return _put_together(pair, loaded, make_drafter, opened, exact=exact, kv_bits=kv_bits, report=report)


def _put_together(
    pair: Opening,
    loaded: LoadedTarget,
    make_drafter: MakeDrafter | None,
    opened: ExitStack,
    *,
    exact: bool,
    kv_bits: int | None,
    report: Progress,
) -> MLXEngine:
    """The engine of a pair; where a step refuses, `opened` closes what the steps before it opened."""
    exactness = _probe(loaded, pair.num_rows, kv_bits, report) if exact else None
    shared = MLXTarget(
        loaded.model,
        max_length=loaded.max_length,
        taps=pair.config.target_layer_ids if pair.config else (),
        exact_width=exactness.width if exactness else 1,
        key_lengths=exactness.key_lengths if exactness else BUCKETS,
        kv_bits=kv_bits,
    )
    opened.callback(shared.close)
    drafter = None if make_drafter is None else make_drafter(shared)
    info = _info(pair, shared, exactness)
    engine = _engine(loaded, shared, drafter, info, pair, report=report)
    opened.pop_all()
    return engine


def _make_drafter(
    pair: Opening, loaded: LoadedTarget, dtype: mx.Dtype | None, report: Progress, opened: ExitStack
) -> MakeDrafter | None:
    """Load what drafts; None = nothing does. `opened`: closes it."""
    if pair.model_free is not None:
        return _copies(pair.model_free)
    if pair.draft is None:
        return None
    if pair.description is None:
        return _load_draft_model(pair.draft, loaded, pair.target.name, dtype, report, opened)
    return _load_draft(pair.draft, pair.description, loaded, pair.target.name, report)


def _engine(
    loaded: LoadedTarget,
    target: MLXTarget,
    drafter: SharedDrafter | None,
    info: EngineInfo,
    pair: Opening,
    *,
    report: Progress,
) -> MLXEngine:
    """The engine, with the measured costs of this pair."""
    max_rows = _checked_rows(info.exactness, pair.num_rows)
    memory = None
    if drafter is not None and not pair.drafting.fixed:
        report("measuring costs", None)
        device = device_of(info, target.kv_bits)
        memory = Memory(load_costs(target, drafter, info, device, max_rows=max_rows))
    return MLXEngine(
        target=target,
        drafter=drafter,
        tokenizer=loaded.tokenizer,
        eos_ids=end_of_sequence_ids(loaded),
        info=info,
        drafting=pair.drafting,
        memory=memory,
        max_rows=max_rows,
        bigrams=pair.bigrams,
    )


class MLXEngine(Engine):
    """The engine over MLX logits."""

    backend = "mlx"
    target: MLXTarget

    def acceptor(self, params: SamplingParams, prompt_ids: Sequence[int]) -> MLXAcceptor:
        return MLXAcceptor(params, prompt_ids, self.target.vocab_size, computed_in=self.target.dtype)

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
    with closing(MLXTarget(target.model, max_length=target.max_length)) as bare:
        shape = bare.shape
    check_shapes(config, shape, draft_name=source.name, target_name=target_name)
    tokens = TargetTokens.of_tokenizer(target.tokenizer, end_of_sequence_ids(target))
    warn(token_findings(config.mask_token_id, raw_config(source.path), tokens))
    warn(tap_findings(config, shape.num_layers))
    report(f"loading draft {source.name}", None)
    # float16 overflows in the feature fusion of real targets; the drafter casts at its border.
    dtype = activation_dtype(target.model)
    network = load_described(description, mx.float32 if dtype == mx.float16 else dtype)
    return functools.partial(load_attribute(MLX_DRAFTERS[config.kind]), network)


def _load_draft_model(
    source: Source,
    target: LoadedTarget,
    target_name: str,
    dtype: mx.Dtype | None,
    report: Progress,
    opened: ExitStack,
) -> MakeDrafter:
    """A language model that drafts. Raises PairError unless its tokens are the target's."""
    loaded = load_target(source, dtype=dtype, progress=report, role="draft")
    check_same_tokens(
        loaded.tokenizer.get_vocab(), target.tokenizer.get_vocab(), draft_name=source.name, target_name=target_name
    )
    model = MLXTarget(loaded.model, max_length=loaded.max_length)
    opened.callback(model.close)
    return functools.partial(load_attribute(MLX_DRAFTERS["autoregressive"]), model)


def _copies(reference: str) -> MakeDrafter:
    """A drafter that needs no model, nor the target."""
    return lambda _target: load_attribute(reference)()


def _info(pair: Opening, shared: MLXTarget, exactness: WidthClass | None) -> EngineInfo:
    info = EngineInfo.of(
        pair.target,
        pair.draft,
        pair.description,
        width=pair.drafting.width,
        dtype=shared.dtype,
        device=f"mlx {device_name()}",
        num_threads=None,
        exactness=exactness,
    )
    return pair.named(info)
