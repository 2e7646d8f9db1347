"""A serving engine as a child process: started, watched until it is healthy, stopped with all its helpers.

Knows processes, signals and one HTTP path; not which engine it runs. The engine gets a session of its own, so that
a Ctrl-C on the terminal reaches only us and we decide how it stops: a polite signal to its main process, a while later
the end for the whole group. If we are killed ourselves, the kernel sends the engine the polite signal (Linux).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dflash.errors import ConfigError, EngineError, MissingExtra
from dflash.launch.plan import Plan

POLL_SECONDS = 0.25
HEALTH_TIMEOUT_SECONDS = 5.0
_LOG_TAIL_LINES = 12
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Server:
    """A running engine."""

    process: subprocess.Popen[bytes]
    plan: Plan
    log: Path | None

    def wait(self) -> int:
        """Block until the engine ends by itself; its exit code."""
        return self.process.wait()


@contextmanager
def serving(
    plan: Plan,
    *,
    environment: Mapping[str, str],
    log: Path | None = None,
    ready_seconds: float = 900.0,
    grace_seconds: float = 30.0,
    waiting: Callable[[float], None] | None = None,
) -> Iterator[Server]:
    """Run the engine for the time of the block; yields once it is healthy.

    `environment`: the whole environment of the child but for the plan's variables. `log`: where its output goes (None:
    it shares ours). `waiting` is told the seconds so far while it loads. However the block is left, every process of
    the engine has ended afterwards.

    Raises MissingExtra if the engine is not installed, ConfigError if the port is taken, EngineError if it ends or
    stays silent before it is healthy.
    """
    _require_engine(plan, environment)
    _require_free_port(plan.url)
    process = _start(plan, environment, log)
    server = Server(process, plan, log)
    try:
        _wait_until_healthy(server, ready_seconds, waiting)
        yield server
    finally:
        stop(process, grace_seconds)


def stop(process: subprocess.Popen[bytes], grace_seconds: float = 30.0) -> None:
    """End the engine and everything in its process group; a second Ctrl-C meanwhile ends it at once."""
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _kill_group(process.pid)
        process.wait()


def healthy(url: str) -> bool:
    """Whether the URL answers 200 in time."""
    try:
        with urllib.request.urlopen(url, timeout=HEALTH_TIMEOUT_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def _start(plan: Plan, environment: Mapping[str, str], log: Path | None) -> subprocess.Popen[bytes]:
    output = log.open("wb") if log is not None else None
    libc = (
        ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    )  # opened here: not between fork and exec

    def die_with_us() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    try:
        return subprocess.Popen(
            plan.argv,
            env={**environment, **plan.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=True,
            preexec_fn=die_with_us if libc is not None else None,
        )
    finally:
        if output is not None:
            output.close()


def _wait_until_healthy(server: Server, seconds: float, waiting: Callable[[float], None] | None) -> None:
    started = time.monotonic()
    while not healthy(server.plan.health_url):
        code = server.process.poll()
        passed = time.monotonic() - started
        if code is not None:
            raise EngineError(
                f"{server.plan.engine} ended with exit code {code} before it served anything, after {passed:.0f} s; "
                f"{_last_words(server.log)}"
            )
        if passed > seconds:
            raise EngineError(
                f"{server.plan.engine} did not answer on {server.plan.health_url} within {seconds:.0f} s; give it "
                f"longer with --ready-timeout, or see its output: {_last_words(server.log)}"
            )
        if waiting is not None:
            waiting(passed)
        time.sleep(POLL_SECONDS)


def _last_words(log: Path | None) -> str:
    """The end of the log, for an error message."""
    if log is None:
        return "its own output above says why."
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"the end of {log}: " + " | ".join(lines[-_LOG_TAIL_LINES:])


def _require_engine(plan: Plan, environment: Mapping[str, str]) -> None:
    program = plan.argv[0]
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise MissingExtra(
            f"{program} was not found, so {plan.engine} cannot be started: {plan.install}, then name that "
            "environment's interpreter with --python (or put its bin folder first in PATH)."
        )


def _require_free_port(url: str) -> None:
    """Another server on the port would be taken for ours: it answers while ours fails to bind."""
    place = urlsplit(url)
    try:
        with socket.create_connection((place.hostname or "127.0.0.1", place.port or 80), timeout=2.0):
            pass
    except OSError:
        return  # nobody there
    raise ConfigError(f"something already answers on {url}; stop it, or choose another --port.")


def _kill_group(group: int) -> None:
    """SIGKILL to whatever is left of the process group that the engine's main process led."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # nothing left (macOS answers a group of zombies with "not permitted")
