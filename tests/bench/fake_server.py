"""A small server with the OpenAI chat API, as vLLM or SGLang, that also misbehaves on demand.

Real HTTP over a local port, so that time limits, broken connections and chunks behave as they do outside.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Handler = BaseHTTPRequestHandler
Behaviour = Callable[["FakeServer", Handler, dict[str, Any]], None]

CHUNKS = ("Hel", "lo, ", "wor", "ld.")
TOKEN_IDS = ((1, 2), (3,), (4, 5, 6), (7,))
HANG_SECONDS = 150.0
"""How long a handler that hangs keeps its connection."""
NUM_TOKENS = sum(map(len, TOKEN_IDS))
PROMPT_IDS = (9, 8, 7)


@dataclass
class FakeServer:
    """What the server does, and what it was asked."""

    chat: Behaviour
    pages: dict[str, Any] = field(default_factory=dict)
    """Path -> JSON or text of a GET."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    """Set at the end, so that hanging handlers leave."""
    server: ThreadingHTTPServer | None = None
    rounds: int = 0
    """Of speculation, as vLLM counts: three accepted tokens in two rounds per request."""

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def die(self) -> None:
        """Stop listening at once; open connections break."""
        assert self.server is not None
        self.server.socket.close()
        threading.Thread(target=self.server.shutdown, daemon=True).start()


@contextlib.contextmanager
def serving(chat: Behaviour, **pages: Any) -> Iterator[FakeServer]:
    """Run a server for the time of the block; `pages` are named without their leading slash, '/' written as '__'."""
    fake = FakeServer(chat)
    fake.pages = {"/v1/models": {"data": [{"id": "fake-model"}]}}
    fake.pages |= {"/" + name.replace("__", "/"): page for name, page in pages.items()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    server.daemon_threads = True
    fake.server = server
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.over.set()
        server.shutdown()
        server.server_close()


def _handler(fake: FakeServer) -> type[Handler]:
    class FakeHandler(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            page = fake.pages.get(self.path)
            if callable(page):
                page = page()
            if page is None:
                send(self, 404, {"error": "no such page"})
            else:
                send(self, 200, page)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.bodies.append(body)
            fake.headers.append(dict(self.headers))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                fake.chat(fake, self, body)

        def log_message(self, format: str, *args: object) -> None:
            """Silence."""

    return FakeHandler


def send(handler: Handler, status: int, page: Any) -> None:
    """A whole answer."""
    data = page.encode() if isinstance(page, str) else json.dumps(page).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "text/plain" if isinstance(page, str) else "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def start_stream(handler: Handler, content_type: str = "text/event-stream") -> None:
    """The head of a stream that ends with the connection."""
    handler.send_response(200)
    handler.send_header("Content-Type", content_type)
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.close_connection = True


def write(handler: Handler, text: str) -> None:
    """Raw bytes of a stream."""
    handler.wfile.write(text.encode())
    handler.wfile.flush()


def event(handler: Handler, value: Any) -> None:
    """One event of a stream."""
    write(handler, f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n")


def chunk(text: str | None = None, *, finish: str | None = None, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """One chunk of a chat completion; `more` goes into its choice."""
    delta = {"role": "assistant", "content": ""} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, **(more or {})}]}


def answers(
    *,
    usage: bool = True,
    ids: bool = False,
    meta: dict[str, Any] | None = None,
    pieces: Sequence[str] = CHUNKS,
    done: bool = True,
    finish: str | None = "stop",
    pause: float = 0.01,
) -> Behaviour:
    """A proper chat server: several tokens per chunk, usage in a last chunk without choices."""
    count = {"prompt_tokens": 3, "completion_tokens": NUM_TOKENS, "total_tokens": 3 + NUM_TOKENS}

    def chat(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
        fake.rounds += 2
        told = {"meta_info": meta} if meta else {}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(pieces)}
            choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish, **told}
            if ids:
                choice["token_ids"] = [one for several in TOKEN_IDS for one in several]
            page: dict[str, Any] = {"choices": [choice], **({"usage": count} if usage else {})}
            send(handler, 200, page | ({"prompt_token_ids": list(PROMPT_IDS)} if ids else {}))
            return
        start_stream(handler)
        event(handler, chunk() | ({"prompt_token_ids": list(PROMPT_IDS)} if ids else {}))
        for index, piece in enumerate(pieces):
            event(handler, chunk(piece, more={"token_ids": list(TOKEN_IDS[index])} if ids else None))
            time.sleep(pause)
        event(handler, chunk("", finish=finish, more=told))
        if usage:
            event(handler, {"choices": [], "usage": count})
        if done:
            event(handler, "[DONE]")

    return chat


def status(code: int, text: str = "no") -> Behaviour:
    """Refuses with a status."""
    return lambda fake, handler, body: send(handler, code, {"error": text})


def hang(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
    """Never answers."""
    fake.over.wait(HANG_SECONDS)


def hang_in_stream(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
    """Stops in the middle of an answer."""
    start_stream(handler)
    event(handler, chunk("Hel"))
    fake.over.wait(HANG_SECONDS)


def drip(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
    """Sends comments for ever: never silent, never an answer."""
    start_stream(handler)
    while not fake.over.wait(0.02):
        write(handler, ": still here\n\n")


def endless(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
    """Sends text for ever."""
    start_stream(handler)
    while not fake.over.is_set():
        event(handler, chunk("ha"))


def break_off(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
    """Ends the stream before the answer is complete."""
    start_stream(handler)
    event(handler, chunk("Hel"))


def reset(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
    """Breaks the connection without a word."""
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def die(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
    """The whole server goes away in the middle of an answer."""
    start_stream(handler)
    event(handler, chunk("Hel"))
    fake.die()
    reset(fake, handler, body)


def malformed(text: str, content_type: str = "text/event-stream") -> Behaviour:
    """A stream of something else."""

    def chat(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
        start_stream(handler, content_type)
        write(handler, text)

    return chat
