"""Clients of servers: what they ask, what they read, and every way in which a server can fail, in bounded time."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from dflash.bench.backends import openai, sglang, vllm
from dflash.bench.backends.sglang import rounds_of_meta
from dflash.bench.backends.vllm import parse_counters
from dflash.bench.protocol import BackendOptions, Cancelled, OpenBackend, Request, RequestFailed, Sampling
from dflash.errors import ConfigError
from dflash.types import Drafting
from tests.bench import fake_server as fake
from tests.bench.fake_server import NUM_TOKENS, Behaviour, serving

ASKED = Request(messages=({"role": "user", "content": "Hi"},), sampling=Sampling(max_new_tokens=32, seed=3))
TEXT = "Hello, world."
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 294.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 63.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 38.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 25.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:num_requests_running{engine="0",model_name="m"} 0.0
"""


PATIENT = 120.0
"""Seconds for what answers at once: no machine is so slow that this is a failure of the server."""
AT_ONCE = 60.0
"""Seconds within which something ends that would otherwise last PATIENT, or for ever."""


@pytest.fixture(autouse=True)
def patient_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is there is not taken for gone because the machine is slow."""
    monkeypatch.setattr("dflash.bench.http.PROBE_SECONDS", PATIENT)


def opened(open_backend: OpenBackend, url: str | None, **changes: Any) -> openai.OpenAiBackend:
    options = replace(BackendOptions(url=url, timeout=PATIENT), **changes)
    backend = open_backend(options, lambda what, share: None)
    assert isinstance(backend, openai.OpenAiBackend)
    return backend


@pytest.mark.parametrize("stream", [True, False])
def test_answers(stream: bool) -> None:
    """Guards against chunks counted as tokens (four chunks hold seven) and against a usage chunk that is overlooked."""
    with serving(fake.answers(pause=0.2)) as server:
        backend = opened(openai.open_backend, server.url, stream=stream)
        answer = backend.generate(ASKED, "speculative")
    assert (answer.text, answer.finish_reason) == (TEXT, "stop")
    assert (answer.num_tokens, answer.num_prompt_tokens) == (NUM_TOKENS, 3)
    assert answer.token_ids is None and answer.rounds is None
    if stream:
        assert answer.first_token_seconds is not None and answer.decode_seconds is not None
        assert answer.first_token_seconds < answer.total_seconds
        assert 0.05 < answer.decode_seconds < answer.total_seconds
    else:
        assert answer.first_token_seconds is None and answer.decode_seconds is None


def test_what_is_asked() -> None:
    """Guards against sampling options that are dropped, and keys that strict servers refuse although nobody asked."""
    with serving(fake.answers()) as server:
        backend = opened(openai.open_backend, server.url, api_key="secret")
        backend.generate(ASKED, "speculative")
        sampling = replace(ASKED.sampling, temperature=0.7, top_p=0.9, top_k=20, ignore_eos=True, thinking=False)
        backend.generate(replace(ASKED, sampling=sampling), "speculative")
    plain, full = server.bodies
    assert plain == {
        "model": "fake-model",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 32,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (full["top_k"], full["top_p"], full["temperature"], full["ignore_eos"]) == (20, 0.9, 0.7, True)
    assert full["chat_template_kwargs"] == {"enable_thinking": False}
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_a_server_without_usage() -> None:
    """Guards against a count that is 0, or guessed from chunks, where the server does not tell it."""
    with serving(fake.answers(usage=False)) as server:
        backend = opened(openai.open_backend, server.url)
        assert backend.generate(ASKED, "speculative").num_tokens is None
        counting = opened(openai.open_backend, server.url)
        counting._count = len
        assert counting.generate(ASKED, "speculative").num_tokens == len(TEXT)
    with serving(fake.answers(usage=False, ids=True)) as server:
        answer = opened(openai.open_backend, server.url).generate(ASKED, "speculative")
    assert answer.num_tokens == NUM_TOKENS
    assert answer.token_ids == (1, 2, 3, 4, 5, 6, 7)
    assert answer.prompt_ids == (9, 8, 7)


def test_a_stream_may_end_without_done_or_without_a_reason() -> None:
    """Guards against refusing servers that leave one of the two out."""
    for chat in (fake.answers(done=False), fake.answers(finish=None)):
        with serving(chat) as server:
            assert opened(openai.open_backend, server.url).generate(ASKED, "speculative").text == TEXT


def test_thoughts_belong_to_the_text() -> None:
    """Guards against reasoning that is timed but not shown, compared or measured for loops."""

    def chat(server: fake.FakeServer, handler: fake.Handler, body: dict[str, Any]) -> None:
        fake.start_stream(handler)
        fake.event(handler, {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm. "}, "finish_reason": None}]})
        fake.event(handler, fake.chunk("Yes.", finish="stop"))

    with serving(chat) as server:
        assert opened(openai.open_backend, server.url).generate(ASKED, "speculative").text == "Hm. Yes."


FAILURES: dict[str, tuple[Behaviour, str, bool]] = {
    "429": (fake.status(429), "rate limited", False),
    "500": (fake.status(500), "server error", False),
    "503": (fake.status(503), "server error", False),
    "400": (fake.status(400), "refused", False),
    "hangs": (fake.hang, "timeout", False),
    "hangs in the stream": (fake.hang_in_stream, "timeout", False),
    "comments for ever": (fake.drip, "timeout", False),
    "text for ever": (fake.endless, "endless answer", False),
    "breaks off": (fake.break_off, "connection", False),
    "resets": (fake.reset, "connection", False),
    "dies": (fake.die, "connection", True),
    "no JSON": (fake.malformed("data: {oops\n\n"), "malformed answer", False),
    "no object": (fake.malformed("data: [1]\n\n"), "malformed answer", False),
    "no completion": (fake.malformed('data: {"hello": 1}\n\n'), "malformed answer", False),
    "wrong kinds": (fake.malformed('data: {"choices": [{"delta": 7}]}\n\n'), "malformed answer", False),
    "no events": (fake.malformed("<html>", "text/html"), "malformed answer", False),
    "error in the stream": (fake.malformed('data: {"error": {"message": "OOM"}}\n\n'), "server error", False),
}
TIMEOUT = 0.6
"""Seconds for a server that never answers."""


@pytest.mark.parametrize("name", FAILURES)
def test_every_failure_is_named_in_bounded_time(name: str) -> None:
    """Guards against a benchmark that a server can hang, and failures that all look the same."""
    chat, kind, fatal = FAILURES[name]
    with serving(chat) as server:
        backend = opened(openai.open_backend, server.url, timeout=TIMEOUT if kind == "timeout" else PATIENT)
        started = time.perf_counter()
        with pytest.raises(RequestFailed) as caught:
            backend.generate(ASKED, "speculative")
        assert time.perf_counter() - started < AT_ONCE
        assert caught.value.kind == kind
        assert caught.value.fatal is fatal
        assert len(str(caught.value)) > 10


@pytest.mark.parametrize("name", ["429", "500", "hangs", "resets"])
def test_the_same_without_streaming(name: str) -> None:
    """Guards against limits that hold for streams only."""
    chat, kind, _ = FAILURES[name]
    with serving(chat) as server:
        timeout = TIMEOUT if kind == "timeout" else PATIENT
        backend = opened(openai.open_backend, server.url, timeout=timeout, stream=False)
        with pytest.raises(RequestFailed) as caught:
            backend.generate(ASKED, "speculative")
    assert caught.value.kind == kind


def test_the_server_says_why() -> None:
    """Guards against "HTTP 400" without the server's own words."""
    with serving(fake.status(400, "max_tokens is too large")) as server:
        backend = opened(openai.open_backend, server.url)
        with pytest.raises(RequestFailed, match="max_tokens is too large"):
            backend.generate(ASKED, "speculative")


def test_cancelling_ends_a_stream() -> None:
    """Guards against Ctrl-C that waits for the end of every answer."""
    given_up = threading.Event()
    with serving(fake.answers(pieces=CHUNKS_MANY, pause=0.3)) as server:
        backend = opened(openai.open_backend, server.url)
        threading.Timer(0.2, given_up.set).start()
        started = time.perf_counter()
        with pytest.raises(Cancelled):
            backend.generate(replace(ASKED, sampling=Sampling(max_new_tokens=500), cancelled=given_up), "speculative")
        assert time.perf_counter() - started < AT_ONCE


CHUNKS_MANY = ("a",) * 500
"""An answer of 150 seconds."""


def test_opening_names_what_is_wrong() -> None:
    """Guards against a traceback for a server that is not there, an address that is none, and options without use."""
    with pytest.raises(ConfigError, match="--url"):
        opened(openai.open_backend, None)
    with pytest.raises(ConfigError, match="http://host:port"):
        opened(openai.open_backend, "localhost:8000")
    with pytest.raises(RequestFailed, match="nobody answers"):
        opened(openai.open_backend, "http://127.0.0.1:9", timeout=2.0)
    with serving(fake.answers(), v1__models={"data": []}) as server, pytest.raises(ConfigError, match="--model"):
        opened(openai.open_backend, server.url)
    for change in ({"dtype": "float32"}, {"threads": 1}, {"width": 3}, {"drafting": Drafting(fixed=True)}):
        with pytest.raises(ConfigError, match="no effect on --backend vllm"):
            opened(vllm.open_backend, "http://localhost:1", **change)
    with pytest.raises(ConfigError, match="--timeout"):
        opened(openai.open_backend, "http://localhost:1", timeout=0.0)


def test_two_servers_are_two_forms() -> None:
    """Guards against plain and speculative requests that reach the same server."""
    with serving(fake.answers()) as plain, serving(fake.answers()) as drafted:
        backend = opened(openai.open_backend, drafted.url + "/v1/", plain_url=plain.url, model="named")
        assert [form.name for form in backend.forms] == ["plain", "speculative"]
        assert backend.forms[1].reference == "plain"
        backend.generate(ASKED, "plain")
        assert (len(plain.bodies), len(drafted.bodies)) == (1, 0)
        assert plain.bodies[0]["model"] == "named"
    with serving(fake.answers()) as plain:
        alone = opened(openai.open_backend, None, plain_url=plain.url)
        assert [form.name for form in alone.forms] == ["plain"]


def test_info_shows_no_password() -> None:
    """Guards against credentials in a record that is published."""
    with serving(fake.answers()) as server:
        url = server.url.replace("http://", "http://user:secret@")
        info = opened(openai.open_backend, url).info()
    assert "secret" not in str(info)
    assert info.target is not None
    assert info.target.name == "fake-model"
    assert any("does not tell acceptance" in note for note in info.notes)


def test_vllm_counters() -> None:
    """Guards against creation times read as counts, one engine of several, and a plain server that shows zeros."""
    counted = parse_counters(METRICS)
    assert counted is not None
    assert (counted.num_rounds, counted.num_tokens, counted.num_accepted, counted.num_proposed) == (42, 105, 63, 294)
    assert (counted.proposed_per_slot, counted.accepted_per_slot) == ([42, 42], [38, 25])
    assert parse_counters("vllm:num_requests_running 0.0\n") is None
    assert parse_counters("") is None


def test_vllm_end_to_end() -> None:
    """Guards against ids, version or counters that the client does not read."""
    with serving(fake.answers(ids=True), version={"version": "0.32.0"}, metrics=METRICS) as server:
        backend = opened(vllm.open_backend, server.url)
        assert backend.info().engine == "vLLM 0.32.0"
        answer = backend.generate(ASKED, "speculative")
        assert server.bodies[0]["return_token_ids"] is True
        assert answer.token_ids is not None
        counted = backend.counters("speculative")
    assert counted is not None
    assert counted.num_rounds == 42


def test_vllm_without_counters_says_so() -> None:
    """Guards against acceptance that is silently missing."""
    with serving(fake.answers(), version={"version": "1"}, metrics="up 1\n") as server:
        backend = opened(vllm.open_backend, server.url)
        assert backend.counters("speculative") is None
        assert any("acceptance is missing" in note for note in backend.info().notes)


@pytest.fixture
def meta() -> dict[str, Any]:
    """As SGLang documents it: five verifications that gave 2 + 1 + 3 + 1 + 2 accepted tokens."""
    return {
        "prompt_tokens": 3,
        "completion_tokens": 15,
        "spec_verify_ct": 5,
        "spec_accept_length": 2.8,
        "spec_accept_histogram": [0, 2, 2, 1],
    }


@pytest.mark.parametrize("stream", [True, False])
def test_sglang_end_to_end(stream: bool, meta: dict[str, Any]) -> None:
    """Guards against meta_info that is not asked for or not found."""
    with serving(fake.answers(meta=meta), server_info={"version": "0.5.22"}) as server:
        backend = opened(sglang.open_backend, server.url, stream=stream)
        assert backend.info().engine == "SGLang 0.5.22"
        rounds = backend.generate(ASKED, "speculative").rounds
    assert server.bodies[0]["return_meta_info"] is True
    assert rounds is not None
    assert (rounds.num_rounds, rounds.num_tokens, rounds.num_accepted) == (5, 14, 9)
    assert rounds.lengths == {2: 2, 3: 2, 4: 1}
    assert (rounds.proposed_per_slot, rounds.accepted_per_slot) == ([5, 5, 5], [5, 3, 1])


def test_sglang_without_a_histogram(meta: dict[str, Any]) -> None:
    """Guards against older servers, and against acceptance of 0 for a server that does not speculate."""
    del meta["spec_accept_histogram"]
    told = rounds_of_meta(meta, None)
    assert told is not None
    assert (told.num_rounds, told.num_tokens, told.lengths) == (5, 14, None)
    del meta["spec_accept_length"]
    counted = rounds_of_meta(meta, None)
    assert counted is not None
    assert counted.num_tokens == 14
    assert rounds_of_meta({"completion_tokens": 15}, 15) is None
    assert rounds_of_meta({"spec_verify_ct": 0}, 15) is None
    assert rounds_of_meta({"spec_verify_ct": 5}, None) is None
