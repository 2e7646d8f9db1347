"""This package's own engines as backends of the benchmark, whatever library computes: all but loading and memory.

Forms over the same weights: plain decoding without padding, plain decoding in the bit-exact form that the draft
promises to repeat (where the probe at load found one), DFlash as the user chose it, and on request DFlash as a fixed
chain. Which of the two plain ones is faster depends on the machine, so both are measured.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import dflash
from dflash.bench.protocol import (
    Answer,
    BackendInfo,
    BackendOptions,
    Cancelled,
    Form,
    ModelInfo,
    Request,
    RequestFailed,
    Rounds,
)
from dflash.bench.provenance import weights_sha256
from dflash.core.engine import Engine
from dflash.errors import ConfigError, PromptError
from dflash.registry import MODEL_FREE_DRAFTERS
from dflash.resolve import AUTO, Progress, resolve_draft, resolve_target
from dflash.types import Drafting, SamplingParams, Stats

PLAIN = Form(name="plain", kind="plain", description="plain decoding, one unpadded row per forward")
PLAIN_EXACT = Form(name="plain-exact", kind="plain", description="plain decoding in the bit-exact form")
DRAFTED = Form(name="dflash", kind="speculative", description="DFlash, drafting as chosen (by default: what pays)")
FIXED = Form(
    name="dflash-fixed",
    kind="speculative",
    description="DFlash, the draft's whole block every round, no copies, no trees",
    by_default=False,
)


def load_arguments(backend: str, options: BackendOptions) -> dict[str, Any]:
    """What every backend's `load` is called with. Raises ConfigError if no target is named."""
    if options.target is None:
        raise ConfigError(f"--backend {backend} needs a target: name one with --target.")
    return {
        "target": options.target,
        "draft": options.draft or AUTO,
        "dtype": options.dtype,
        "device": options.device,
        "width": options.width,
        "trust_remote_code": options.trust_remote_code,
        "drafting": options.drafting,
    }


def loaded_models(options: BackendOptions, progress: Progress) -> tuple[ModelInfo, ModelInfo]:
    """Which files the target and the draft of `options` are, hashed; a drafter without a model has no hash."""
    assert options.target is not None
    progress("hashing the weights", None)
    source = resolve_target(options.target, allow_code=options.trust_remote_code)
    target = ModelInfo(name=source.name, revision=source.revision, sha256=source.sha256 or weights_sha256(source.path))
    if options.draft in MODEL_FREE_DRAFTERS:
        return target, ModelInfo(name=str(options.draft))
    draft = resolve_draft(options.draft or AUTO, source)
    return target, ModelInfo(name=draft.name, revision=draft.revision, sha256=weights_sha256(draft.path))


class OwnBackend(ABC):
    """Implements `dflash.bench.protocol.Backend` over an engine."""

    max_concurrency = 1
    same_seed_same_text = True

    def __init__(self, engine: Engine, target: ModelInfo, draft: ModelInfo) -> None:
        self._engine = engine
        self._target = target
        self._draft = draft

    @property
    @abstractmethod
    def _tells_times(self) -> bool:
        """Whether the parts of a round can be told apart without waiting for each, which would slow down what is
        measured."""

    @property
    def _device_name(self) -> str:
        """For the record."""
        return self._engine.info.device

    @abstractmethod
    def start_memory(self) -> None:
        """Set the peak back."""

    @abstractmethod
    def peak_memory_bytes(self) -> int | None:
        """Most memory since then."""

    @property
    def forms(self) -> Sequence[Form]:
        """Plain, plain in the bit-exact form if there is one, DFlash as chosen, DFlash fixed if that is another."""
        plain = [PLAIN, PLAIN_EXACT] if self._engine.info.exact else [PLAIN]
        drafted = [DRAFTED] if self._engine.drafting.fixed or self._draft.sha256 is None else [DRAFTED, FIXED]
        return [*plain, *(dataclasses.replace(form, reference=plain[-1].name) for form in drafted)]

    def info(self) -> BackendInfo:
        """The engine's own account of what it loaded."""
        info = self._engine.info
        details = {"drafting": _described(self._engine.drafting)}
        if info.num_bigrams:
            details["bigrams"] = str(info.num_bigrams)
        if info.width is not None:
            details["width"] = str(info.width)
        if info.exactness is not None:
            details["exactness"] = info.exactness.reason
        return BackendInfo(
            engine=f"dflash {dflash.__version__}",
            target=self._target,
            draft=self._draft,
            block_size=info.block_size,
            dtype=info.dtype,
            device=self._device_name,
            num_threads=info.num_threads,
            details=details,
            notes=()
            if self._tells_times
            else ("On this device the time split is not told: waiting would disturb it.",),
        )

    def _drafting(self, form: str) -> Drafting:
        """Of one form. Steady, so that a second run makes the same rounds: its acceptance is then the same figure."""
        chosen = self._engine.drafting
        if form == FIXED.name:
            return Drafting(fixed=True, draft_window=chosen.draft_window)
        return dataclasses.replace(chosen, steady=True)

    def generate(self, request: Request, form: str) -> Answer:
        """One generation through the engine's own loop."""
        started = time.perf_counter()
        first: float | None = None
        pieces: list[str] = []
        token_ids: list[int] = []
        stats = Stats()
        prompt_ids = self._prompt_ids(request)
        try:
            events = self._engine.stream(
                prompt_ids=prompt_ids,
                params=_params(request),
                use_draft=form in (DRAFTED.name, FIXED.name),
                exact=False if form == PLAIN.name else None,
                drafting=self._drafting(form),
            )
        except PromptError as error:
            raise RequestFailed("prompt", str(error)) from error
        with closing(events):
            for event in events:
                first = first or time.perf_counter() - started
                if request.cancelled.is_set():
                    raise Cancelled("cancelled.")
                pieces.append(event.text)
                token_ids += event.token_ids
                stats = event.stats
        return Answer(
            text="".join(pieces),
            total_seconds=time.perf_counter() - started,
            token_ids=tuple(token_ids),
            num_tokens=stats.num_tokens,
            prompt_ids=tuple(prompt_ids),
            num_prompt_tokens=stats.num_prompt_tokens,
            first_token_seconds=first,
            decode_seconds=stats.decode_seconds,
            finish_reason=stats.finish_reason,
            rounds=rounds_of(stats, times=self._tells_times),
            remark=stats.drafting_stopped,
        )

    def counters(self, form: str) -> Rounds | None:
        """None: every answer tells its own rounds."""
        return None

    def close(self) -> None:
        """Leave the target as it was found."""
        self._engine.close()

    def _prompt_ids(self, request: Request) -> list[int]:
        messages = [dict(message) for message in request.messages]
        thinking = request.sampling.thinking
        if thinking is None:
            return self._engine.tokenize(messages)
        switched, other = (self._rendered(messages, enable_thinking=value) for value in (thinking, not thinking))
        if switched == other:
            raise ConfigError("this target's chat template has no switch for thinking; leave --thinking out.")
        ids: list[int] = self._engine.tokenizer(switched, add_special_tokens=False)["input_ids"]
        return ids

    def _rendered(self, messages: list[dict[str, str]], **template_kwargs: Any) -> str:
        text = self._engine.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **template_kwargs
        )
        assert isinstance(text, str)
        return text


def rounds_of(stats: Stats, *, times: bool = True) -> Rounds:
    """A generation's speculation, as its loop counted it, with (`times`) or without its time split."""
    return Rounds(
        num_rounds=stats.num_rounds,
        num_tokens=sum(stats.acceptance_lengths),
        lengths=Counter(stats.acceptance_lengths),
        num_proposed=stats.num_proposed,
        num_accepted=stats.num_accepted,
        proposed_per_slot=tuple(stats.proposed_per_slot),
        accepted_per_slot=tuple(stats.accepted_per_slot),
        accepted_by_source=dict(stats.accepted_by_source) or None,
        draft_seconds=stats.draft_seconds if times else None,
        verify_seconds=stats.verify_seconds if times else None,
        other_seconds=stats.overhead_seconds if times else None,
    )


def _described(drafting: Drafting) -> str:
    """The choices in words."""
    window = "" if drafting.draft_window is None else f", draft window {drafting.draft_window}"
    if drafting.fixed:
        return f"whole blocks of the draft, fixed{window}"
    copies = "with copies" if drafting.copies else "without copies"
    copies += "" if drafting.bigrams else ", without bigrams"
    return f"by measured cost, mode {drafting.mode}, {copies}{window}"


def _params(request: Request) -> SamplingParams:
    sampling = request.sampling
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
    )
