"""Any server that speaks the OpenAI chat API, measured from outside.

Speculation is the server's own business, so plain and speculative decoding are two servers of one target: `--plain-url`
and `--url`; with one of them only its side is measured. What the API does not tell (acceptance, memory) is left out;
`vllm.py` and `sglang.py` add what those two tell. A chunk of a stream may hold any number of tokens, so tokens are
counted by the server's `usage`, by its token ids, or by a tokenizer that the user names, and never by chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from dflash.bench.http import DONE, Server
from dflash.bench.protocol import (
    Answer,
    BackendInfo,
    BackendOptions,
    Form,
    ModelInfo,
    Request,
    RequestFailed,
    Rounds,
    Sampling,
)
from dflash.bench.provenance import weights_sha256
from dflash.errors import ConfigError
from dflash.resolve import AUTO, Progress, resolve_draft, resolve_target

MAX_CONCURRENCY = 512
SLACK_CHUNKS = 64
"""A stream may have so many more chunks than tokens were asked for before it counts as endless."""
PLAIN = Form(name="plain", kind="plain", description="the server at --plain-url")
SPECULATIVE = Form(name="speculative", kind="speculative", description="the server at --url", reference=PLAIN.name)
KNOWN = ("target", "draft", "url", "plain_url", "model", "api_key", "stream", "tokenizer", "timeout")

CountTokens = Callable[[str], int]


def open_backend(options: BackendOptions, progress: Progress) -> OpenAiBackend:
    """Find the servers that `options` name. Raises RequestFailed if one does not answer, and ConfigError."""
    options.refuse_others("openai", *KNOWN)
    return OpenAiBackend(options, progress)


class OpenAiBackend:
    """Implements `dflash.bench.protocol.Backend`."""

    max_concurrency = MAX_CONCURRENCY
    same_seed_same_text = False

    def __init__(self, options: BackendOptions, progress: Progress) -> None:
        addresses = {PLAIN.name: options.plain_url, SPECULATIVE.name: options.url}
        if not any(addresses.values()):
            raise ConfigError("name the server: --url for the one that speculates, --plain-url for the plain one.")
        self._options = options
        self.servers = {
            form: Server(url, timeout=options.timeout, api_key=options.api_key)
            for form, url in addresses.items()
            if url is not None
        }
        progress("looking for the server", None)
        self._models = {form: options.model or self._first_model(server) for form, server in self.servers.items()}
        self._count = _tokenizer(options.tokenizer)
        self._target, self._draft = _stated_models(options, progress)

    @property
    def forms(self) -> Sequence[Form]:
        """One per server that was named."""
        return [form for form in (PLAIN, SPECULATIVE) if form.name in self.servers]

    def info(self) -> BackendInfo:
        """Addresses and the model's name; weights only where the user stated which they are."""
        return BackendInfo(
            engine=self.engine(),
            target=self._target or ModelInfo(name=next(iter(self._models.values()))),
            draft=self._draft,
            details={f"server, {form}": _shown(server.url) for form, server in self.servers.items()},
            notes=self.notes(),
        )

    def engine(self) -> str:
        """Name and version, as far as the server tells."""
        return "a server with the OpenAI API (it does not tell its version)"

    def notes(self) -> list[str]:
        """What is missing, and why."""
        notes = ["A server does not tell its memory, nor the time of its drafts and verifications."]
        if not self._options.stream:
            notes.append("Answers came in one piece (--no-stream): no time to first token, no time per token.")
        if self._draft is None:
            notes.append("Which draft the server uses was not stated (--draft), so its hash is missing.")
        return notes + self.acceptance_notes()

    def acceptance_notes(self) -> list[str]:
        """What this API does not tell about speculation."""
        return ["The OpenAI API does not tell acceptance; --backend vllm and --backend sglang read it where they can."]

    def generate(self, request: Request, form: str) -> Answer:
        """One chat completion, streamed unless the user chose otherwise."""
        server = self.servers[form]
        body = {
            "model": self._models[form],
            "messages": [dict(message) for message in request.messages],
            **sampling_body(request.sampling),
            **self.extra_body(),
        }
        reply = Reply(max_chunks=request.sampling.max_new_tokens + SLACK_CHUNKS)
        path = "/v1/chat/completions"
        started = time.perf_counter()
        if self._options.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            with closing(server.post_events(path, body, request.cancelled)) as events:
                for event in events:
                    reply.add(event, time.perf_counter() - started)
        else:
            reply.add(server.post_json(path, body, request.cancelled), None)
        seconds = time.perf_counter() - started
        if not reply.finished:
            raise server.broken_off()
        return self._answer(reply, seconds)

    def extra_body(self) -> dict[str, Any]:
        """Further keys of a request that this kind of server understands."""
        return {}

    def rounds(self, reply: Reply) -> Rounds | None:
        """Speculation as the answer tells it."""
        return None

    def counters(self, form: str) -> Rounds | None:
        """None: the OpenAI API has no counters."""
        return None

    def start_memory(self) -> None:
        """Nothing to do: memory is the server's."""

    def peak_memory_bytes(self) -> int | None:
        """None: not told."""
        return None

    def close(self) -> None:
        """Close the connections; the servers go on."""
        for server in self.servers.values():
            server.close()

    def _answer(self, reply: Reply, total_seconds: float) -> Answer:
        text = "".join(reply.pieces)
        num_tokens = reply.usage.get("completion_tokens")
        if num_tokens is None and reply.token_ids:
            num_tokens = len(reply.token_ids)
        if num_tokens is None and self._count is not None:
            num_tokens = self._count(text)
        decode = None
        if reply.first is not None and reply.last is not None and reply.last > reply.first:
            decode = reply.last - reply.first
        return Answer(
            text=text,
            total_seconds=total_seconds,
            token_ids=tuple(reply.token_ids) or None,
            prompt_ids=tuple(reply.prompt_ids) or None,
            num_tokens=num_tokens,
            num_prompt_tokens=reply.usage.get("prompt_tokens"),
            first_token_seconds=reply.first,
            decode_seconds=decode,
            finish_reason=reply.finish_reason,
            rounds=self.rounds(reply),
        )

    def _first_model(self, server: Server) -> str:
        listed = server.get_json("/v1/models")
        try:
            name = listed["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise ConfigError(f"{server.url} lists no model; name it with --model.") from None
        return str(name)


@dataclass
class Reply:
    """A chat completion, put together from one object or from many chunks."""

    max_chunks: int
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    """SGLang's `meta_info`."""
    finish_reason: str | None = None
    first: float | None = None
    """Seconds until the first piece of text; None without streaming."""
    last: float | None = None
    num_chunks: int = 0
    done: bool = False

    @property
    def finished(self) -> bool:
        """Whether the server said that this is all."""
        return self.done or self.finish_reason is not None

    def add(self, event: Mapping[str, Any], seconds: float | None) -> None:
        """Take one chunk, or the whole answer (`seconds` None). Raises RequestFailed for what is no chat completion."""
        if event is DONE:
            self.done = True
            return
        if event.get("error"):
            raise RequestFailed("server error", f"the server broke off with {str(event['error'])[:200]}")
        try:
            self._add(event, seconds)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise RequestFailed(
                "malformed answer", f"this is no chat completion ({error!r}): {str(event)[:200]}"
            ) from error
        if self.num_chunks > self.max_chunks:
            raise RequestFailed("endless answer", f"the server sent more than {self.max_chunks} pieces of text.")

    def _add(self, event: Mapping[str, Any], seconds: float | None) -> None:
        for name, number in (event.get("usage") or {}).items():
            if name in ("completion_tokens", "prompt_tokens"):
                self.usage[name] = int(number)
        self.meta |= event.get("meta_info") or {}
        self.prompt_ids += event.get("prompt_token_ids") or []
        for choice in event["choices"] if "usage" not in event else event.get("choices") or []:
            message = choice.get("delta") or choice.get("message") or {}
            thought = message.get("reasoning_content") or message.get("reasoning") or ""
            piece = thought + (message.get("content") or "")
            if piece:
                self.pieces.append(piece)
                self.num_chunks += 1
                if seconds is not None:
                    self.first = self.first or seconds
                    self.last = seconds
            self.token_ids += choice.get("token_ids") or []
            self.meta |= choice.get("meta_info") or {}
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def sampling_body(sampling: Sampling) -> dict[str, Any]:
    """What a request says about sampling. Keys beyond OpenAI's own appear only if they were asked for: strict servers
    refuse unknown ones."""
    body: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if sampling.template_kwargs:
        body["chat_template_kwargs"] = sampling.template_kwargs
    return body


def _tokenizer(spec: str | None) -> CountTokens | None:
    if spec is None:
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(spec)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer {spec!r} cannot be loaded ({error}); give a hub id or a folder.") from error
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _stated_models(options: BackendOptions, progress: Progress) -> tuple[ModelInfo | None, ModelInfo | None]:
    """What the user says that the server runs, with the hashes of those files."""
    if options.target is None:
        if options.draft not in (None, AUTO):
            raise ConfigError("--draft states what the server uses; state its --target as well.")
        return None, None
    progress("hashing the weights", None)
    target = resolve_target(options.target)
    sources = [target] if options.draft is None else [target, resolve_draft(options.draft, target)]
    infos = [
        ModelInfo(name=one.name, revision=one.revision, sha256=one.sha256 or weights_sha256(one.path))
        for one in sources
    ]
    return infos[0], infos[1] if len(infos) > 1 else None


def _shown(url: str) -> str:
    """An address without user name and password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port}" if parts.port else f"{parts.scheme}://{parts.hostname}"
