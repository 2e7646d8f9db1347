"""Transformers' own DFlash as a backend of the benchmark: the peer of every PyTorch user, on the same weights.

`generate(..., assistant_model=draft, speculation_type="dflash")` of Transformers 5.19 and later, and its plain
`generate`, over one loaded target. Nothing of this package decodes here: it only reads the files, tokenizes the prompt
and takes the time at which each round's tokens arrive.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
import transformers
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from dflash.backends.torch.draft_loading import load_described
from dflash.backends.torch.loading import (
    LoadedTarget,
    check_pair,
    choose_device,
    choose_dtype,
    end_of_sequence_ids,
    load_target,
    set_threads,
    spread_of,
)
from dflash.bench.memory import ProcessMemory
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
from dflash.core.dialects.transformers import DIALECT as NATIVE_LAYOUT
from dflash.core.draft_config import DraftConfig
from dflash.core.draft_reader import DraftDescription, read_draft
from dflash.errors import ConfigError, MissingExtra
from dflash.resolve import AUTO, Progress, Source, resolve_draft, resolve_target
from dflash.types import Clock

PLAIN = Form(name="plain", kind="plain", description="Transformers' generate")
NATIVE = Form(name="native", kind="speculative", description="Transformers' own DFlash", reference=PLAIN.name)
DRAFT_CLASS = "MuseGlimmerAssistant"
"""The draft class that Transformers' DFlash drives; z-lab's v1 network under other tensor names."""

_KNOWN = ("target", "draft", "dtype", "device", "threads", "trust_remote_code")


def open_backend(options: BackendOptions, progress: Progress) -> TransformersBackend:
    """Load the target and the draft into Transformers' classes.

    Raises errors of `dflash.load`, MissingExtra for a Transformers without DFlash and ConfigError for other options.
    """
    options.refuse_others("transformers", *_KNOWN)
    if options.target is None:
        raise ConfigError("--backend transformers needs a target: name one with --target.")
    if spread_of(options.device) is not None:
        raise ConfigError(f"--backend transformers runs on one device here, not on '{options.device}': name one.")
    draft_classes()  # before anything is loaded
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    threads = set_threads(options.threads)
    target = resolve_target(options.target, allow_code=options.trust_remote_code, progress=progress)
    draft = resolve_draft(options.draft or AUTO, target, progress=progress)
    description = read_draft(draft.path)
    loaded = load_target(
        target, dtype=dtype, device=device, trust_remote_code=options.trust_remote_code, progress=progress
    )
    check_pair(description.config, loaded.model, draft_name=draft.name, target_name=target.name)
    progress(f"loading draft {draft.name}", None)
    assistant = native_draft(description, dtype, name=draft.name).to(device).eval()
    return TransformersBackend(loaded, assistant, description.config, (target, draft), threads)


def draft_classes() -> tuple[Any, Any]:
    """Transformers' configuration and network of a draft. Raises MissingExtra where it has none."""
    try:
        return getattr(transformers, f"{DRAFT_CLASS}Config"), getattr(transformers, f"{DRAFT_CLASS}Model")
    except AttributeError:
        raise MissingExtra(
            f"Transformers {transformers.__version__} has no DFlash of its own: pip install 'transformers>=5.19'."
        ) from None


def native_draft(draft: DraftDescription, dtype: torch.dtype, *, name: str) -> Any:
    """A draft of any layout as Transformers' network, on the CPU.

    Raises UnsupportedModel for a draft that the class cannot compute, CheckpointError for damaged weights.
    """
    settings, network = draft_classes()
    assert NATIVE_LAYOUT.write is not None
    tensors = load_described(draft, torch.device("cpu"), dtype, name=name).state_dict()
    native = network(settings(**NATIVE_LAYOUT.write(draft.config))).to(dtype)
    native.load_state_dict({NATIVE_LAYOUT.stored(ours): tensor for ours, tensor in tensors.items()}, strict=True)
    return native


class TransformersBackend:
    """Implements `dflash.bench.protocol.Backend`."""

    max_concurrency = 1
    same_seed_same_text = False
    forms: Sequence[Form] = (PLAIN, NATIVE)

    def __init__(
        self,
        loaded: LoadedTarget,
        assistant: Any,
        config: DraftConfig,
        sources: tuple[Source, Source],
        num_threads: int,
    ) -> None:
        self._loaded, self._assistant, self._config, self._num_threads = loaded, assistant, config, num_threads
        target, draft = sources
        self._target = ModelInfo(
            name=target.name, revision=target.revision, sha256=target.sha256 or weights_sha256(target.path)
        )
        self._draft = ModelInfo(name=draft.name, revision=draft.revision, sha256=weights_sha256(draft.path))
        self._memory = ProcessMemory()

    def info(self) -> BackendInfo:
        """Versions and weights, and where this peer reads the draft otherwise."""
        notes = ["Transformers does not tell how a round's time divides into drafting and verifying."]
        if self._config.draft_vocabulary_file is not None:
            notes.append("The draft's own vocabulary is ignored: every draft token is scored over the whole head.")
        if self._config.target_layer_ids[-1] == self._loaded.model.config.get_text_config().num_hidden_layers - 1:
            notes.append(
                "The draft's last tap is the target's last layer: Transformers hands it over after the final norm, "
                "which lowers acceptance for a draft that was trained on it before the norm."
            )
        return BackendInfo(
            engine=f"Transformers {transformers.__version__}",
            target=self._target,
            draft=self._draft,
            block_size=self._config.block_size,
            dtype=str(self._loaded.model.dtype).removeprefix("torch."),
            device=str(self._loaded.model.device),
            num_threads=self._num_threads,
            notes=notes,
        )

    def generate(self, request: Request, form: str) -> Answer:
        """One call of `generate`. Raises RequestFailed for a prompt that does not fit, Cancelled."""
        prompt_ids = self._prompt_ids(request)
        arrivals = _Arrivals(len(prompt_ids), request.cancelled, time.perf_counter)
        drafting = {"assistant_model": self._assistant, "speculation_type": "dflash"} if form == NATIVE.name else {}
        torch.manual_seed(request.sampling.seed)
        inputs = torch.tensor([prompt_ids], device=self._loaded.model.device)
        model: Any = self._loaded.model
        with torch.inference_mode():
            model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=self._generation_config(request),
                streamer=arrivals,
                **drafting,
            )
        return self._answer(arrivals, len(prompt_ids), self._stop_ids(request))

    def counters(self, form: str) -> Rounds | None:
        """None: every answer tells its own rounds."""
        return None

    def start_memory(self) -> None:
        """Set the peak of the device, or of the process, back."""
        if self._loaded.model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._loaded.model.device)
        else:
            self._memory.start()

    def peak_memory_bytes(self) -> int | None:
        """Of the device's allocator, or of the process."""
        if self._loaded.model.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._loaded.model.device)
        return self._memory.peak_bytes()

    def close(self) -> None:
        """Nothing is held but memory."""

    def _prompt_ids(self, request: Request) -> list[int]:
        messages = [dict(message) for message in request.messages]
        switches: dict[str, Any] = dict(request.sampling.template_kwargs)
        text = self._loaded.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **switches
        )
        ids: list[int] = self._loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        room = self._loaded.model.config.get_text_config().max_position_embeddings
        if len(ids) + request.sampling.max_new_tokens > room:
            raise RequestFailed(
                "prompt", f"{len(ids)} prompt tokens and the answer do not fit into {room}; shorten one of them."
            )
        return ids

    def _generation_config(self, request: Request) -> GenerationConfig:
        sampling = request.sampling
        config: GenerationConfig = deepcopy(self._loaded.model.generation_config)
        config.max_new_tokens, config.max_length = sampling.max_new_tokens, None
        config.do_sample = sampling.temperature > 0
        config.temperature = sampling.temperature if config.do_sample else None
        config.top_p = sampling.top_p if config.do_sample else None
        config.top_k = sampling.top_k if config.do_sample else None
        config.eos_token_id = list(self._stop_ids(request)) or None
        if config.pad_token_id is None:
            config.pad_token_id = 0  # one row is never padded; without an id, every call would warn
        return config

    def _stop_ids(self, request: Request) -> frozenset[int]:
        return frozenset() if request.sampling.ignore_eos else end_of_sequence_ids(self._loaded)

    def _answer(self, arrivals: _Arrivals, num_prompt_tokens: int, stop_ids: frozenset[int]) -> Answer:
        token_ids = [token for tokens in arrivals.tokens for token in tokens]
        stopped = bool(token_ids) and token_ids[-1] in stop_ids
        text = self._loaded.tokenizer.decode(
            token_ids[:-1] if stopped else token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return Answer(
            text=text,
            total_seconds=arrivals.seconds[-1],
            token_ids=tuple(token_ids),
            num_tokens=len(token_ids),
            num_prompt_tokens=num_prompt_tokens,
            first_token_seconds=arrivals.seconds[0],
            decode_seconds=arrivals.seconds[-1] - arrivals.seconds[0],
            finish_reason="stop" if stopped else "length",
            rounds=rounds_of(arrivals.tokens, self._config.block_size),
        )


def rounds_of(arrived: Sequence[Sequence[int]], block_size: int) -> Rounds:
    """Rounds by what each of them brought; the first arrival is the prefill's token."""
    lengths = [len(tokens) for tokens in arrived[1:]]
    return Rounds(
        num_rounds=len(lengths),
        num_tokens=sum(lengths),
        lengths=Counter(lengths),
        num_accepted=sum(lengths) - len(lengths),
        accepted_per_slot=[sum(length > slot for length in lengths) for slot in range(1, block_size)],
    )


class _Arrivals(BaseStreamer):
    """Takes down each round's tokens and when they came; the first thing that `generate` hands over is the prompt."""

    def __init__(self, num_prompt_tokens: int, cancelled: threading.Event, clock: Clock) -> None:
        self.tokens: list[list[int]] = []
        self.seconds: list[float] = []
        self._num_prompt_tokens, self._cancelled, self._clock = num_prompt_tokens, cancelled, clock
        self._started = clock()
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:  # value [tokens] or [1, tokens]
        """Called once per round, on the thread that decodes."""
        if self._cancelled.is_set():
            raise Cancelled("cancelled.")
        tokens = value.reshape(-1).tolist()
        if not self._prompt_seen:
            assert len(tokens) == self._num_prompt_tokens
            self._prompt_seen = True
            return
        self.tokens.append(tokens)
        self.seconds.append(self._clock() - self._started)

    def end(self) -> None:
        """The last round was the last."""
