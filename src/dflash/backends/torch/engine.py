"""The PyTorch engine: `load` opens a target and its draft once and puts the parts together.

Requests are `core/engine.py`, decoding is `core/loop.py`, the models' files are `loading.py`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash.backends.torch.calibration import device_of
from dflash.backends.torch.clock import synchronised_clock
from dflash.backends.torch.compat import text_config
from dflash.backends.torch.draft_loading import load_described
from dflash.backends.torch.exactness import probe
from dflash.backends.torch.joining import join_and_pack
from dflash.backends.torch.loading import (
    LoadedTarget,
    check_pair,
    choose_device,
    choose_dtype,
    end_of_sequence_ids,
    fits_memory,
    load_target,
    set_threads,
    spread_of,
)
from dflash.backends.torch.plain_form import packed_steps_are_faster
from dflash.backends.torch.sampling import TorchAcceptor
from dflash.backends.torch.target import TorchTarget
from dflash.core.calibration import Device, load_costs
from dflash.core.draft_config import DraftConfig
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
from dflash.core.pair_checks import TargetTokens, raw_config, token_findings, warn
from dflash.registry import DRAFTERS, load_attribute
from dflash.resolve import AUTO, Progress, Source, log_steps
from dflash.types import Clock, Drafting, SamplingParams

logger = logging.getLogger(__name__)

MakeDrafter = Callable[[TorchTarget], SharedDrafter]
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
    progress: Progress | None = None,
) -> TorchEngine:
    """Open a target and a draft for generation.

    Args:
        target: hub id, local folder, GGUF file or built-in name.
        draft: the same; "auto" = the draft shipped for this target, "ngram" = copies of earlier text only, without a
            model, None = plain decoding only. A language model with the target's tokenizer drafts, too.
        dtype: "float32", "bfloat16" or "float16"; None = bfloat16 where the device computes in it, else float32.
        device: "cpu", "cuda", "cuda:1" ...; "balanced" or "sequential" = the target's layers spread over all GPUs;
            None = a CUDA device if there is one.
        num_threads: CPU threads of PyTorch, process-wide; None = the physical cores this process may use, but not
            more than PyTorch is already limited to (OMP_NUM_THREADS).
        exact: probe for the width class in which plain and speculative decoding give the same bits, and decode in it.
        trust_remote_code: run Python code that comes with the target.
        width: most rows of a verify forward (anchor and width - 1 draft tokens); None = as many as pay, or the block
            where drafting is fixed.
        drafting: how requests draft unless they say otherwise; None = by measured cost.
        progress: told what is being done and how much of it is finished; without it, steps are logged.

    Raises:
        ModelError, MissingExtra, ConfigError: with the cure in the message; nothing stays loaded.
    """
    check_options(dtype=dtype, device=device, num_threads=num_threads, exact=exact, progress=progress)
    report = progress or log_steps(logger)
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    set_threads(num_threads)
    pair = open_pair(
        target,
        draft,
        drafting=drafting,
        width=width,
        trust_remote_code=trust_remote_code,
        report=report,
        backend=TorchEngine.backend,
        kinds=DRAFTERS,
    )
    loaded = load_target(
        pair.target,
        dtype=chosen_dtype,
        device=chosen_device,
        spread=spread_of(device),
        trust_remote_code=trust_remote_code,
        progress=report,
    )
    pair = pair.for_target(text_config(loaded.model).num_hidden_layers)
    return _put_together(pair, loaded, exact=exact, report=report)


def _put_together(pair: Opening, loaded: LoadedTarget, *, exact: bool, report: Progress) -> TorchEngine:
    """Load the draft and make the engine; where a step refuses, what the steps before it opened is closed."""
    with ExitStack() as opened:
        # The draft's weights before the probe: wrong ones should not cost its time.
        make_drafter = _make_drafter(pair, loaded, report, opened)
        shared, exactness = _shared_target(loaded.model, pair.config, pair.num_rows, exact=exact, report=report)
        opened.callback(shared.close)
        drafter = None if make_drafter is None else make_drafter(shared)
        info = _info(pair, shared, exactness)
        engine = _engine(loaded, shared, drafter, info, pair, report=report)
        opened.pop_all()
    return engine


def _make_drafter(pair: Opening, loaded: LoadedTarget, report: Progress, opened: ExitStack) -> MakeDrafter | None:
    """Load what drafts; None = nothing does. `opened`: closes it."""
    if pair.model_free is not None:
        return _copies(pair.model_free)
    if pair.draft is None:
        return None
    if pair.description is None:
        return _load_draft_model(pair.draft, loaded, pair.target.name, report, opened)
    return _load_draft(pair.draft, pair.description, loaded, pair.target.name, report)


def _shared_target(
    model: PreTrainedModel, config: DraftConfig | None, num_rows: int, *, exact: bool, report: Progress
) -> tuple[TorchTarget, WidthClass | None]:
    """Pack the weights, time plain steps, probe for bit-exactness; the target that sessions are made from."""
    report("packing weights", None)
    join_and_pack(model)
    report("timing plain steps", None)
    packs_single = packed_steps_are_faster(model)
    exactness = _probe(model, num_rows, report) if exact else None
    shared = TorchTarget(
        model,
        taps=config.target_layer_ids if config else (),
        exact_width=exactness.width if exactness else 1,
        key_lengths=exactness.key_lengths if exactness else BUCKETS,
        packs_single=packs_single,
    )
    return shared, exactness


def _engine(
    loaded: LoadedTarget,
    target: TorchTarget,
    drafter: SharedDrafter | None,
    info: EngineInfo,
    pair: Opening,
    *,
    report: Progress,
) -> TorchEngine:
    """The engine, with the measured costs of this pair."""
    max_rows = _checked_rows(target, info.exactness, pair.num_rows)
    memory = None
    if drafter is not None and not pair.drafting.fixed:
        report("measuring costs", None)
        memory = Memory(load_costs(target, drafter, info, device_of(info), max_rows=max_rows))
    return TorchEngine(
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


class TorchEngine(Engine):
    """The engine over torch logits."""

    backend = "torch"
    target: TorchTarget
    tokenizer: PreTrainedTokenizerBase

    def acceptor(self, params: SamplingParams, prompt_ids: Sequence[int]) -> TorchAcceptor:
        return TorchAcceptor(
            params, prompt_ids, self.target.vocab_size, self.target.device, computed_in=self.target.dtype
        )

    def as_numpy(self, logits: torch.Tensor) -> NDArray[np.float32]:
        numbers: NDArray[np.float32] = logits.float().cpu().numpy()
        return numbers

    def device(self) -> Device:
        return device_of(self.info)

    def profiling_clock(self) -> Clock:
        return synchronised_clock(self.target.device)


def _checked_rows(target: TorchTarget, exactness: WidthClass | None, num_rows: int) -> int:
    """Most rows of a verify forward: those of the probe, so that no bit changes; without one, what a device takes."""
    if exactness is not None and exactness.holds:
        return max(exactness.widths_tried)
    return max(PROBED_WIDTH if target.device.type == "cpu" else WIDEST_ON_DEVICES, num_rows)


def _probe(model: Any, num_rows: int, report: Progress) -> WidthClass:
    report("checking bit-exactness", None)
    # The same widths with and without a draft, so that both settle on the same class. A block wider than that either
    # belongs to the class too, or makes the probe say that bit-exactness does not hold.
    found = probe(model, max_width=max(PROBED_WIDTH, num_rows), block_size=num_rows)
    if not found.holds:
        logger.warning(
            "bit-exact decoding is not possible here: %s Near-ties may differ from plain decoding.", found.reason
        )
    return found


def _load_draft(
    source: Source, description: DraftDescription, target: LoadedTarget, target_name: str, report: Progress
) -> MakeDrafter:
    """Check a draft against its target and load its weights."""
    config, model = description.config, target.model
    check_pair(config, model, draft_name=source.name, target_name=target_name)
    tokens = TargetTokens.of_tokenizer(target.tokenizer, end_of_sequence_ids(target))
    warn(token_findings(config.mask_token_id, raw_config(source.path), tokens))
    warn(tap_findings(config, text_config(model).num_hidden_layers))
    report(f"loading draft {source.name}", None)
    # float16 overflows in the feature fusion of real targets; the drafter casts at its border.
    dtype = torch.float32 if model.dtype == torch.float16 else model.dtype
    network = load_described(description, model.device, dtype, name=source.name)
    with fits_memory(f"draft {source.name}", dtype, model.device):
        network.for_decoding()
    return functools.partial(load_attribute(DRAFTERS[config.kind]), network)


def _load_draft_model(
    source: Source, target: LoadedTarget, target_name: str, report: Progress, opened: ExitStack
) -> MakeDrafter:
    """A language model that drafts. Raises PairError unless its tokens are the target's."""
    dtype, device = target.model.dtype, target.model.device
    loaded = load_target(source, dtype=dtype, device=device, progress=report, role="draft")
    check_same_tokens(
        loaded.tokenizer.get_vocab(), target.tokenizer.get_vocab(), draft_name=source.name, target_name=target_name
    )
    join_and_pack(loaded.model)
    model = TorchTarget(loaded.model, packs_single=True)
    opened.callback(model.close)
    return functools.partial(load_attribute(DRAFTERS["autoregressive"]), model)


def _copies(reference: str) -> MakeDrafter:
    """A drafter that needs no model, nor the target."""
    return lambda _target: load_attribute(reference)()


def _info(pair: Opening, shared: TorchTarget, exactness: WidthClass | None) -> EngineInfo:
    info = EngineInfo.of(
        pair.target,
        pair.draft,
        pair.description,
        width=pair.drafting.width,
        dtype=shared.dtype,
        device=str(shared.device),
        num_threads=torch.get_num_threads(),
        exactness=exactness,
        packs_single=shared.packs_single,
    )
    return pair.named(info)
