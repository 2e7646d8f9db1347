"""Talking to a server: JSON and server-sent events, in bounded time, with every failure named.

Knows HTTP and nothing of models. A request ends at its deadline even if the server keeps sending; a server that cannot
be reached any more is told apart from one that is slow by asking it for something small.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2

from dflash.bench.protocol import Cancelled, Failure, RequestFailed
from dflash.errors import ConfigError

PROBE_SECONDS = 5.0
"""How long a server may take to show that it is still there."""
MAX_CONNECTIONS = 1024
DONE: dict[str, Any] = {"done": True}
"""What `post_events` yields last if the server ended the stream properly; recognised by identity."""
_SHOWN = 200
"""Characters of a server's error that are repeated in ours."""


class Server:
    """One base address. Its methods may be called from many threads."""

    def __init__(self, url: str, *, timeout: float, api_key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no address of a server; write it as http://host:port.")
        if not 0 < timeout < float("inf"):
            raise ConfigError(f"--timeout must be positive, not {timeout}.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the server's key holds characters that no key has; set its variable again.")
        try:
            address = httpx2.URL(self.url)
            urlsplit(self.url).port  # noqa: B018  # raises where it is no port
        except (httpx2.InvalidURL, ValueError) as error:
            raise ConfigError(f"{url!r} is no address of a server ({error}); write it as http://host:port.") from error
        self._client = httpx2.Client(
            base_url=address,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx2.Timeout(timeout, connect=min(timeout, 10.0)),
            transport=_Bounded(limits=httpx2.Limits(max_connections=MAX_CONNECTIONS)),
            trust_env=False,  # a proxy between us and the server would be measured, too
        )

    def get(self, path: str, *, timeout: float | None = None) -> httpx2.Response:
        """GET something small. Raises RequestFailed."""
        with self._failures():
            response = self._client.get(path, **_until(timeout or min(self._timeout, 30.0), None))
            self._check(response)
            return response

    def get_json(self, path: str) -> Any:
        """GET a JSON document. Raises RequestFailed."""
        return _parsed(self.get(path).text, f"GET {path}")

    def post_json(self, path: str, body: Mapping[str, Any], cancelled: threading.Event) -> dict[str, Any]:
        """POST and wait for the whole answer. Raises RequestFailed, Cancelled."""
        with self._failures():
            response = self._client.post(path, json=dict(body), **_until(self._timeout, cancelled))
            self._check(response)
            return _object(_parsed(response.text, f"POST {path}"), path)

    def post_events(
        self, path: str, body: Mapping[str, Any], cancelled: threading.Event
    ) -> Generator[dict[str, Any], None, None]:
        """POST and yield each JSON event as it arrives, then `DONE` unless the stream broke off.

        Raises RequestFailed, Cancelled.
        """
        with (
            self._failures(),
            self._client.stream("POST", path, json=dict(body), **_until(self._timeout, cancelled)) as response,
        ):
            if response.status_code >= 400:
                response.read()
            self._check(response)
            for event in httpx2.EventSource(response):
                if event.data.strip() == "[DONE]":
                    yield DONE
                    return
                if event.data.strip():
                    yield _object(_parsed(event.data, "an event of the stream"), path)

    def is_there(self) -> bool:
        """Whether anything answers, with whatever status."""
        try:
            self._client.get("/v1/models", **_until(PROBE_SECONDS, None), timeout=PROBE_SECONDS)
        except httpx2.HTTPError:
            return False
        except RequestFailed:
            return False
        return True

    def broken_off(self) -> RequestFailed:
        """The failure of an answer that ended too early: is anybody still there?"""
        failure = RequestFailed("connection", "the answer broke off: neither a finish_reason nor a last event came.")
        return failure if self.is_there() else self._gone("connection", failure)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Name what went wrong on the way."""
        try:
            yield
        except RequestFailed as failure:
            if failure.kind == "timeout" and not self.is_there():
                raise self._gone("timeout", failure) from failure
            raise
        except httpx2.SSEError as error:
            raise RequestFailed("malformed answer", f"{self.url} sent no valid event stream ({error}).") from error
        except httpx2.TimeoutException as error:
            message = f"{self.url} gave no answer within {self._timeout:g} s ({type(error).__name__})."
            if not self.is_there():
                raise self._gone("timeout", error) from error
            raise RequestFailed("timeout", message) from error
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            if not self.is_there():
                raise self._gone("connection", error) from error
            raise RequestFailed("connection", f"the connection to {self.url} broke ({error}).") from error

    def _gone(self, kind: Failure, error: Exception) -> RequestFailed:
        return RequestFailed(
            kind, f"nobody answers at {self.url} ({error}); start the server, or correct the address.", fatal=True
        )

    def _check(self, response: httpx2.Response) -> None:
        status = response.status_code
        if status < 400:
            return
        said = " ".join(response.text.split())[:_SHOWN]
        kind: Failure = "rate limited" if status == 429 else "server error" if status >= 500 else "refused"
        raise RequestFailed(kind, f"{self.url} answered HTTP {status}: {said or 'without a word'}")


def _until(timeout: float, cancelled: threading.Event | None) -> dict[str, Any]:
    return {"extensions": {"dflash_deadline": time.monotonic() + timeout, "dflash_cancelled": cancelled}}


class _Bounded(httpx2.HTTPTransport):
    """A transport that looks at the deadline and at the user between any two pieces of an answer: the client's own
    time limit starts anew with every byte, so that a server which drips would never reach it."""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = super().handle_request(request)
        assert isinstance(response.stream, httpx2.SyncByteStream)
        response.stream = _BoundedStream(
            response.stream, request.extensions["dflash_deadline"], request.extensions["dflash_cancelled"]
        )
        return response


class _BoundedStream(httpx2.SyncByteStream):
    def __init__(self, stream: httpx2.SyncByteStream, deadline: float, cancelled: threading.Event | None) -> None:
        self._stream = stream
        self._deadline = deadline
        self._cancelled = cancelled

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            if self._cancelled is not None and self._cancelled.is_set():
                raise Cancelled("cancelled.")
            if time.monotonic() > self._deadline:
                raise RequestFailed("timeout", "the server was still sending when the time for one request was over.")
            yield piece

    def close(self) -> None:
        self._stream.close()


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestFailed("malformed answer", f"{where} is not JSON ({error}): {text[:_SHOWN]!r}") from error


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestFailed("malformed answer", f"POST {path} gave a JSON {type(value).__name__}, not an object.")
    return value
