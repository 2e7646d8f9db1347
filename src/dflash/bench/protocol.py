"""What the benchmark asks of a backend, and what a backend answers: the seam between the runner and the engines.

A backend decodes in one or more *forms* ("plain", "dflash", ...), all over the same weights, and answers one request
at a time in the form that is asked for. It measures its own times, because only it knows when the first token was
there; the runner decides what is asked, in which order, how often and how many at once.

Whatever a backend cannot tell is None: never 0, never a guess. Adding a backend is one file in `bench/backends/` with a
function `open_backend(options, progress) -> Backend`, and one line in `registry.BENCH_BACKENDS`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dflash.errors import ConfigError, DFlashError
from dflash.resolve import Progress
from dflash.types import Drafting

FormKind = Literal["plain", "speculative"]

Failure = Literal[
    "timeout", "connection", "rate limited", "server error", "refused", "malformed answer", "endless answer", "prompt"
]
"""How a request can fail: no answer in time; nobody answers or the connection breaks; HTTP 429; HTTP 5xx; any other
HTTP error; an answer that cannot be read; more output than was asked for; a prompt that the target cannot take."""

GONE: frozenset[Failure] = frozenset({"timeout", "connection"})
"""Failures that, repeated without a success between them, mean that the engine is not there any more."""


class RequestFailed(DFlashError):
    """One request got no usable answer. The runner counts it under its kind and goes on."""

    def __init__(self, kind: Failure, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.kind: Failure = kind
        self.fatal = fatal
        """The engine is known to be gone: asking on makes no sense."""


class Cancelled(DFlashError):
    """The user gave up while this request was being answered; it counts neither as done nor as failed."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way in which a backend decodes: a column of the tables."""

    name: str
    """Short and unique within the backend: "plain", "plain-exact", "dflash"."""
    kind: FormKind
    description: str
    """For a reader of the report, in a few words."""
    reference: str | None = None
    """Name of the plain form whose output this one promises to repeat, greedily or with the same seed; None: the
    fastest plain form stands in. Only speculative forms have one."""
    by_default: bool = True
    """Measured unless the user names the forms (`--form`)."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw: the options that every engine and server knows."""

    max_new_tokens: int
    temperature: float = 0.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    seed: int = 0
    ignore_eos: bool = False
    thinking: bool | None = None
    """The chat template's `enable_thinking`; None = not passed, the template's own default."""

    @property
    def template_kwargs(self) -> dict[str, bool]:
        """Further arguments of the chat template (`chat_template_kwargs` of a server)."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One question to be answered."""

    messages: tuple[Mapping[str, str], ...]
    """{"role": ..., "content": ...}, the last one of the user."""
    sampling: Sampling
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when the user gave up: a backend that answers in pieces looks at it between two of them and raises
    `Cancelled`."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Speculation while decoding one request, or a server's counters over some time. A round is one forward of the
    target after the prefill; None is what the engine does not tell."""

    num_rounds: int
    num_tokens: int
    """Tokens that these rounds gave, the target's own included: acceptance length = num_tokens / num_rounds."""
    lengths: Mapping[int, int] | None = None
    """Tokens per round -> number of rounds (the acceptance histogram)."""
    num_proposed: int | None = None
    num_accepted: int | None = None
    proposed_per_slot: Sequence[int] | None = None
    """[i]: rounds in which slot i+1 was proposed."""
    accepted_per_slot: Sequence[int] | None = None
    """[i]: rounds in which slot i+1 was accepted."""
    accepted_by_source: Mapping[str, int] | None = None
    """Accepted draft tokens by where the guess came from: "draft", "copy", "both"."""
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    other_seconds: float | None = None
    """Decoding time that is neither of the two."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request's answer and its times."""

    text: str
    total_seconds: float
    """From sending the request to its end."""
    token_ids: Sequence[int] | None = None
    num_tokens: int | None = None
    """Emitted tokens, a final stop token included."""
    prompt_ids: Sequence[int] | None = None
    """What the target was fed, chat template included."""
    num_prompt_tokens: int | None = None
    first_token_seconds: float | None = None
    """Time to the first token (TTFT)."""
    decode_seconds: float | None = None
    """From the first token to the last one; None where the answer came in one piece."""
    finish_reason: str | None = None
    """"stop" or "length"."""
    rounds: Rounds | None = None
    remark: str | None = None
    """What a reader must know of this answer, in a sentence (drafting was given up on the way, ...)."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Which weights ran."""

    name: str
    revision: str | None = None
    """Commit of a hub repository."""
    sha256: str | None = None
    """Of the weights file, or of all of them (`provenance.weights_sha256`)."""


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """What a backend runs, resolved: kept in the record."""

    engine: str
    """Name and version of what does the decoding: "dflash 0.1.0", "vLLM 0.32.0"."""
    target: ModelInfo | None
    draft: ModelInfo | None
    block_size: int | None = None
    """Slots of the draft's block, anchor included."""
    dtype: str | None = None
    device: str | None = None
    num_threads: int | None = None
    details: Mapping[str, str] = field(default_factory=dict)
    """Anything else that a reader needs to repeat the run."""
    notes: Sequence[str] = ()
    """Sentences about what this backend cannot tell or does otherwise."""


class Backend(Protocol):
    """An engine or a server, opened. Methods take a form by its name."""

    @property
    def forms(self) -> Sequence[Form]:
        """In the order in which they alternate; the plain ones first."""

    @property
    def max_concurrency(self) -> int:
        """Requests that `generate` takes at once, from as many threads; 1 = only from the main thread."""

    @property
    def same_seed_same_text(self) -> bool:
        """Whether at a temperature above 0 plain and speculative forms must give the same output for one seed. Greedy
        output is always compared."""

    def info(self) -> BackendInfo:
        """What runs."""

    def generate(self, request: Request, form: str) -> Answer:
        """Answer one request. Raises RequestFailed."""

    def counters(self, form: str) -> Rounds | None:
        """Speculation since the engine started, where only running totals are told (Prometheus); the runner takes
        differences. None: `generate` tells it, or nobody does. Raises RequestFailed."""

    def start_memory(self) -> None:
        """Forget the peak of memory so far, where that is possible."""

    def peak_memory_bytes(self) -> int | None:
        """Most memory in use since `start_memory`; None: not told."""

    def close(self) -> None:
        """Free everything."""


_SPELLED = {"stream": "--no-stream", "drafting": "--mode, --no-tree, --no-copy, --fixed or --draft-window"}
"""Fields of the class below whose option is not called like them."""


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Everything that a user can say about what is measured. None and False = not said; a backend refuses what has
    no effect on it (`refuse_others`)."""

    target: str | None = None
    draft: str | None = None
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    width: int | None = None
    trust_remote_code: bool = False
    drafting: Drafting | None = None
    """How this package's engines draft; None = by their default."""
    url: str | None = None
    """Base address of the server that speculates."""
    plain_url: str | None = None
    """Base address of a server of the same target without a draft."""
    model: str | None = None
    """Name of the model in a server's requests; None = the first one that the server lists."""
    api_key: str | None = None
    stream: bool = True
    tokenizer: str | None = None
    """Hub id or folder, to count tokens where a server does not."""
    timeout: float = 600.0
    """Most seconds for one request to a server."""

    def refuse_others(self, backend: str, *known: str) -> None:
        """Raise ConfigError if something was said that `backend`, which reads only `known`, would ignore."""
        for one in dataclasses.fields(self):
            if one.name not in known and getattr(self, one.name) != one.default:
                option = _SPELLED.get(one.name, f"--{one.name.replace('_', '-')}")
                raise ConfigError(f"{option} has no effect on --backend {backend}; leave it out.")


class OpenBackend(Protocol):
    """The function that `registry.BENCH_BACKENDS` names."""

    def __call__(self, options: BackendOptions, progress: Progress) -> Backend:
        """Open what `options` say. Raises errors of `dflash.errors`."""
