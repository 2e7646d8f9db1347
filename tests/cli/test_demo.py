"""`dflash demo`: fair speeds, and the truth about the tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash.cli.comparison import first_difference, num_runs
from dflash.cli.demo import questions
from tests.cli.fakes import MARGIN, CommandLine


def test_built_in_prompts_are_there() -> None:
    """Guards against a package without its data files."""
    prompts = questions()
    assert len(prompts) == 4
    assert len({prompt.id for prompt in prompts}) == 4


def test_runs_alternate_and_plain_is_timed_in_its_fastest_form(cli: CommandLine) -> None:
    """Guards against dividing by the padded form of plain decoding, and against all runs of one kind in a row."""
    assert cli.run("demo", "--limit", "1", "--repeats", "2").code == 0
    forms = [(call["use_draft"], call["exact"]) for call in cli.engine.calls[2:]]  # two warm-up runs come first
    plain, dflash, padded = (False, False), (True, None), (False, None)
    assert forms == [plain, dflash, plain, dflash, padded]
    assert len(forms) == num_runs(1, 2)


def test_json_record(cli: CommandLine) -> None:
    """Guards against a record that lacks what the tables show, or is not JSON alone."""
    record = json.loads(cli.run("demo", "--json", "--limit", "2").out)
    assert record["same_tokens"] is True
    assert record["plain_tokens_per_second"] == pytest.approx(100.0)
    assert record["dflash_tokens_per_second"] == pytest.approx(300.0)
    assert record["speedup"] == pytest.approx(3.0)
    assert record["acceptance_length"] == pytest.approx(3.0)
    assert record["acceptance_histogram"] == [[1, 0], [2, 0], [3, 8]]
    assert [row["id"] for row in record["prompts"]] == ["maths", "code"]
    assert record["prompts"][0]["first_difference"] is None


def test_the_speed_up_is_over_the_faster_plain_form(cli: CommandLine) -> None:
    """Guards against a flattering figure where the bit-exact form happens to be the faster one: in the record, in the
    rows of the prompts and in the tables."""
    cli.engine.exact_seconds = 0.005
    record = json.loads(cli.run("demo", "--json", "--limit", "2").out)
    assert record["plain_tokens_per_second"] == pytest.approx(100.0)
    assert record["plain_padded_tokens_per_second"] == pytest.approx(200.0)
    assert record["speedup"] == pytest.approx(1.5)
    assert [row["speedup"] for row in record["prompts"]] == [pytest.approx(1.5)] * 2
    shown = cli.run("demo", "--limit", "1").out
    assert "plain · 200.0 tok/s" in shown
    assert "1.50x" in shown
    assert "3.00x" not in shown


def test_tables(cli: CommandLine) -> None:
    """Guards against a demo that does not say what ran, how fast, and whether the tokens are the same."""
    outcome = cli.run("demo", "--limit", "1")
    for part in ("target fake", "100.0 tok/s", "300.0 tok/s", "3.00x", "same tokens: yes", "bit-exact"):
        assert part in outcome.out


def test_first_difference_is_named_with_its_margin(cli: CommandLine) -> None:
    """Guards against a demo that hides that the draft changed the text, or that the device is not bit-exact."""
    cli.engine.drafted = "Hello, World."
    cli.engine.holds = False
    outcome = cli.run("demo", "--limit", "1")
    assert "same tokens: no, from token 7 on: plain 'w', DFlash 'W'" in outcome.out
    assert f"{MARGIN:.3g} apart" in outcome.out
    assert "not bit-exact here: measured by a fake." in outcome.out
    (row,) = json.loads(cli.run("demo", "--limit", "1", "--json").out)["prompts"]
    assert row["first_difference"] == {"position": 7, "plain": "w", "dflash": "W", "margin": MARGIN}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"), [([1, 2], [1, 2], None), ([1, 2], [1], 1), ([], [3], 0), ([1, 2, 3], [1, 9, 3], 1)]
)
def test_first_difference(ours: list[int], theirs: list[int], expected: int | None) -> None:
    """Guards against equal prefixes of different length passing as the same text."""
    assert first_difference(ours, theirs) == expected


def test_own_prompts(cli: CommandLine, tmp_path: Path) -> None:
    """Guards against --prompts being ignored, and against a bad line without its number."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Mine?"}\n', encoding="utf-8")
    record = json.loads(cli.run("demo", "--prompts", str(path), "--json").out)
    assert [row["prompt"] for row in record["prompts"]] == ["Mine?"]
    path.write_text('{"prompt": "Mine?"}\nno JSON\n', encoding="utf-8")
    outcome = cli.run("demo", "--prompts", str(path))
    assert outcome.code == 2
    assert "prompts.jsonl:2:" in outcome.err


def test_one_token_answers_give_no_figures_and_no_crash(cli: CommandLine) -> None:
    """Guards against a division by zero when no decode round happened."""
    cli.engine.answers = ("H",)
    assert cli.run("demo", "--limit", "1").code == 0
    record = json.loads(cli.run("demo", "--limit", "1", "--json").out)
    assert record["speedup"] is None
    assert record["acceptance_length"] is None
