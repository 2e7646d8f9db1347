"""The script that measures all ways to draft: its record goes on where it stopped, and its figures are of its lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import measure_modes


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """The script, with these arguments."""
    monkeypatch.setattr("sys.argv", ["measure_modes.py", *map(str, arguments)])
    measure_modes.main()


@pytest.fixture
def sets(tmp_path: Path) -> list[Path]:
    """Two sets: one of three prompts, one of one."""
    paths = [tmp_path / "long.jsonl", tmp_path / "short.jsonl"]
    for path, count in zip(paths, (3, 1), strict=True):
        path.write_text("".join(json.dumps({"prompt": f"w{number} w2 w3"}) + "\n" for number in range(count)))
    return paths


def test_a_record_goes_on(
    sets: list[Path],
    target_folder: Path,
    trained_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fault: prompts are measured again, lines of another measurement are taken for one's own, a set falls short."""
    out = tmp_path / "modes.jsonl"
    given = (*sets, "--target", target_folder, "--draft", trained_folder, "--dtype", "float32", "--threads", "1")
    given = (*given, "--forms", "plain,plain-exact,auto", "--repeats", "2", "-n", "12", "--least", "2", "--out", out)
    run(monkeypatch, *given, "--limit", "1")
    first = out.read_text().splitlines()
    run(monkeypatch, *given, "--limit", "3")
    header, *lines = out.read_text().splitlines()
    assert [header, *lines][: len(first)] == first
    assert json.loads(header)["max_new_tokens"] == 12
    rows = [measure_modes.Measured.read(line) for line in lines]
    assert [(row.dataset, row.index) for row in rows] == [("long", 0), ("short", 0), ("long", 1), ("long", 2)]
    assert all(len(run.seconds) == 2 for row in rows for run in row.runs.values())
    assert all(len({run.tokens for run in row.runs.values()}) == 1 for row in rows)
    told = capsys.readouterr().out
    assert "all sets (4 prompts)" in told
    assert "4/4" in told
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *given, "--seed", "5")
    assert "another measurement" in capsys.readouterr().err


def test_figures(sets: list[Path]) -> None:
    """Fault: a mean where the median is meant, ratios to the slower plain form, shares that are not weighted."""
    runs = {
        "plain": measure_modes.Run([2.0, 9.0, 1.0], 10, 10, 0.0, 0.1, {}, "a"),
        "plain-exact": measure_modes.Run([4.0], 10, 10, 0.0, 0.2, {}, "b"),
        "auto": measure_modes.Run([1.0], 10, 4, 0.25, 0.05, {"draft": 4}, "b"),
    }
    faster = {**runs, "plain": measure_modes.Run([5.0], 10, 10, 0.0, 0.1, {}, "b")}
    rows = [measure_modes.Measured("long", index, each) for index, each in enumerate((runs, faster))]
    figures = measure_modes.summary(rows)
    assert figures["plain"]["tokens_per_second"] == pytest.approx(20 / 7)
    assert figures["auto"]["over_plain"] == pytest.approx(10 / (20 / 7))
    assert figures["auto"]["slowest_prompt_over_plain"] == pytest.approx(2.0)
    assert figures["auto"]["acceptance_length"] == pytest.approx(2.5)
    assert figures["plain-exact"]["overhead_share"] == pytest.approx(0.2)
    assert [figures[name]["same_tokens"] for name in runs] == [1, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--forms", "plain,fixd"), "no fixd"),
        (("--forms", "auto"), "needs plain"),
        (("other/long.jsonl",), "same name"),
    ],
)
def test_what_cannot_be_measured_is_said_first(
    arguments: tuple[str, ...],
    message: str,
    sets: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fault: a slip is noticed after hours, or ends in a traceback."""
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *sets, *arguments)
    assert message in capsys.readouterr().err
