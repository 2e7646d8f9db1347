"""Signs of life where there is no terminal: rare lines, also while one step takes long, and none for short work."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest

from dflash.cli.progress import LEAST_SECONDS, Lines, _written_beside
from tests.cli.fakes import CommandLine

CLI = Path(__file__).parents[2] / "src" / "dflash" / "cli"


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lines_are_rare() -> None:
    """Guards against a log full of progress: nothing before ten seconds, then a line each ten, then more rarely."""
    clock, written = Clock(), list[str]()
    lines = Lines("starting", written.append, clock)
    times = []
    for second in range(1, 3601):
        clock.now = 100.0 + second
        lines.show("training", second / 3600)
        before = len(written)
        lines.write_if_due()
        if len(written) > before:
            times.append(second)
    assert times[:4] == [10, 20, 30, 40]
    assert 20 < len(times) < 60
    assert all(after - before >= 0.1 * before for before, after in pairwise(times))
    assert written[0] == "training 0% (0:00:10)"
    assert written[-1].startswith("training 9")


def test_no_line_for_short_work() -> None:
    """Guards against noise on the standard error of every script that calls a command."""
    clock, written = Clock(), list[str]()
    lines = Lines("starting", written.append, clock)
    clock.now += LEAST_SECONDS - 0.1
    lines.write_if_due()
    assert written == []
    assert lines.seconds_left() == pytest.approx(0.1)


def test_a_step_that_says_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against silence while a model of gigabytes is read, which is one step that tells nobody how far it is, and
    against a thread that outlives the work."""
    monkeypatch.setattr("dflash.cli.progress.LEAST_SECONDS", 0.001)
    written, second = list[str](), threading.Event()

    def write(line: str) -> None:
        written.append(line)
        if sum(one.startswith("reading weights (") for one in written) == 2:  # the thread is quicker at times
            second.set()

    with _written_beside(Lines("reading", write)) as show:
        show("reading weights", None)
        assert second.wait(60)
    assert written[-1].startswith("reading weights (")
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_what_is_counted_is_told(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against minutes of timed runs that a log file shows nothing of."""
    monkeypatch.setattr("dflash.cli.progress.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("dflash.cli.progress.LEAST_SHARE", 0.0)
    outcome = cli.run("demo", "--limit", "1", "--json")
    assert outcome.code == 0
    counts = [line.split(", ")[1].split(" of ") for line in outcome.err.splitlines() if " of " in line]
    done, total = [int(count) for count, _ in counts], {rest.split(" ")[0] for _, rest in counts}
    assert done == list(range(len(done)))
    assert total == {str(done[-1])}


def test_one_way_to_show_progress() -> None:
    """Guards against a command with a bar of its own, which shows nothing where there is no terminal."""
    own = [path.name for path in CLI.glob("*.py") if "rich.progress" in path.read_text(encoding="utf-8")]
    assert own == ["progress.py"]
