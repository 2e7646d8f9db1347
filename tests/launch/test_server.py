"""Starting, watching and stopping an engine: whatever happens, nothing of it is left and the reason is said.

The engine is a small real process with a helper process of its own (`fake_engine.py`), so signals, ports and process
groups are the real thing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dflash.errors import ConfigError, EngineError, MissingExtra
from dflash.launch.plan import Plan
from dflash.launch.server import healthy, serving
from tests.launch import fake_engine

SOON = 120.0
"""Seconds for what takes one: starting Python alone may take ten beside other jobs."""
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Stage:
    """One fake engine: how it is to behave, on which port, and what it reported of itself."""

    def __init__(self, folder: Path, habit: str = "") -> None:
        self.port = free_port()
        self.report, self.log = folder / "report.json", folder / "engine.log"
        self.environment: Mapping[str, str] = {
            **os.environ,
            "FAKE_ENGINE_REPORT": str(self.report),
            "FAKE_ENGINE_HABIT": habit,
        }
        self.plan = Plan(
            engine="fake",
            argv=(sys.executable, fake_engine.__file__, "--port", str(self.port)),
            env={"FROM_THE_PLAN": "yes"},
            url=f"http://127.0.0.1:{self.port}",
            install="pip install fake",
        )

    def told(self) -> dict[str, Any]:
        """What the engine wrote about itself when it started."""
        deadline = time.monotonic() + SOON
        while not self.report.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        read: dict[str, Any] = json.loads(self.report.read_text(encoding="utf-8"))
        return read

    def assert_gone(self) -> None:
        """Neither the engine nor its helper runs any more (a zombie that nobody has waited for yet is gone, too)."""
        for pid in self.told()["pids"]:
            deadline = time.monotonic() + SOON
            while _running(pid) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not _running(pid), pid


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            return sys.platform != "linux"
        return False
    return state != "Z"


def test_serves_and_leaves_nothing(tmp_path: Path) -> None:
    """Guards against helpers of the engine that outlive it and keep the GPU's memory."""
    stage = Stage(tmp_path)
    with serving(stage.plan, environment=stage.environment, log=stage.log) as server:
        assert healthy(stage.plan.health_url)
        told = stage.told()
        assert told["environment"]["FROM_THE_PLAN"] == "yes"
        assert os.getpgid(server.process.pid) == server.process.pid != os.getpgid(0)
    stage.assert_gone()
    assert not healthy(stage.plan.health_url)
    assert "fake engine serves" in stage.log.read_text(encoding="utf-8")


def test_an_error_inside_stops_it(tmp_path: Path) -> None:
    """Guards against an engine that goes on serving after the program that started it gave up."""
    stage = Stage(tmp_path)
    with pytest.raises(ZeroDivisionError), serving(stage.plan, environment=stage.environment, log=stage.log):
        _ = 1 / 0
    stage.assert_gone()


def test_deaf_to_sigterm(tmp_path: Path) -> None:
    """Guards against waiting for ever for an engine that does not listen."""
    stage = Stage(tmp_path, "deaf")
    started = time.monotonic()
    with serving(stage.plan, environment=stage.environment, log=stage.log, grace_seconds=0.3):
        pass
    stage.assert_gone()
    assert time.monotonic() - started < SOON


def test_dies_before_it_serves(tmp_path: Path) -> None:
    """Guards against polling a port that nobody will ever open, and against an error without the engine's own words."""
    stage = Stage(tmp_path, "dies")
    with (
        pytest.raises(EngineError, match=f"exit code {fake_engine.DIES_WITH}.*{fake_engine.LAST_WORDS}") as caught,
        serving(stage.plan, environment=stage.environment, log=stage.log),
    ):
        pytest.fail("it never served")
    assert len(str(caught.value).splitlines()) == 1
    stage.assert_gone()


def test_never_healthy(tmp_path: Path) -> None:
    """Guards against hanging on an engine that hangs."""
    stage, waits = Stage(tmp_path, "silent"), list[float]()

    def wait(passed: float) -> None:
        waits.append(passed)
        stage.told()  # its processes have started, however long that takes

    with (
        pytest.raises(EngineError, match="--ready-timeout"),
        serving(stage.plan, environment=stage.environment, log=stage.log, ready_seconds=0.5, waiting=wait),
    ):
        pytest.fail("it never served")
    assert waits
    stage.assert_gone()


def test_taken_port(tmp_path: Path) -> None:
    """Guards against measuring somebody else's server, which answers while ours cannot bind."""
    stage = Stage(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", stage.port))
        other.listen()
        with (
            pytest.raises(ConfigError, match="--port"),
            serving(stage.plan, environment=stage.environment, log=stage.log),
        ):
            pytest.fail("it started")
    assert not stage.report.exists()


def test_engine_that_is_not_installed(tmp_path: Path) -> None:
    """Guards against FileNotFoundError instead of the command that installs it."""
    stage = Stage(tmp_path)
    missing = Plan(engine="fake", argv=("no-such-engine",), env={}, url=stage.plan.url, install="pip install fake")
    with pytest.raises(MissingExtra, match="pip install fake"), serving(missing, environment=stage.environment):
        pytest.fail("it started")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=["int", "term", "kill"]
)
def test_the_command_stopped_from_outside(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Guards against orphans after Ctrl-C, after `kill`, and (where the kernel helps) even after `kill -9`."""
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux tells a child that its parent died")
    stage = Stage(tmp_path)
    with _command(stage, tmp_path) as running:
        _until(lambda: "ready on" in stage.log.read_text(encoding="utf-8"))
        running.send_signal(number)
        assert running.wait(SOON) == code
    if number == signal.SIGKILL:  # the engine's main process gets SIGTERM; its helpers are the engine's own business
        _until(lambda: not _running(stage.told()["pids"][0]))
        os.kill(stage.told()["pids"][1], signal.SIGKILL)
    stage.assert_gone()


def test_the_command_when_the_engine_fails(tmp_path: Path) -> None:
    """Guards against exit code 0, or a traceback, when the engine ended by itself."""
    stage = Stage(tmp_path, "fails")
    with _command(stage, tmp_path) as running:
        assert running.wait(SOON) == 2
    said = stage.log.read_text(encoding="utf-8")
    assert "ready on" in said
    assert f"exit code {fake_engine.FAILS_WITH}" in said
    assert "Traceback" not in said
    stage.assert_gone()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_the_engines_output_in_a_file(tmp_path: Path) -> None:
    """Guards against a sign of life that goes on beside a server that is ready, or keeps it from being stopped."""
    stage, log = Stage(tmp_path), tmp_path / "its.log"
    with _command(stage, tmp_path, "--log", str(log)) as running:
        _until(lambda: "ready on" in stage.log.read_text(encoding="utf-8"))
        running.send_signal(signal.SIGTERM)
        assert running.wait(SOON) == 143
    assert "fake engine serves" in log.read_text(encoding="utf-8")
    assert "fake engine serves" not in stage.log.read_text(encoding="utf-8")
    stage.assert_gone()


@contextmanager
def _command(stage: Stage, folder: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """`dflash launch sglang`, over a module that is called like SGLang's and is the fake."""
    module = folder / "modules" / "sglang" / "launch_server.py"
    module.parent.mkdir(parents=True)
    module.write_text("from tests.launch.fake_engine import main\nmain()\n", encoding="utf-8")
    words = ["launch", "sglang", "Qwen/Qwen3-8B", "--platform", "nvidia", "--python", sys.executable]
    path = os.pathsep.join([str(folder / "modules"), str(ROOT / "src"), str(ROOT)])
    stage.log.touch()
    with stage.log.open("wb") as output:
        running = subprocess.Popen(
            [sys.executable, "-m", "dflash", *words, "--port", str(stage.port), *more],
            env={**stage.environment, "PYTHONPATH": path},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    with running:
        try:
            yield running
        finally:
            running.kill()  # else leaving the block waits for ever where an assertion has failed


def _until(holds: Any) -> None:
    deadline = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)
