"""`dflash generate`: prompt in, text or record out."""

from __future__ import annotations

import json

import pytest

from tests.cli.fakes import DRAFT_SECONDS, ROUND_SECONDS, VERIFY_SECONDS, CommandLine


def test_text_goes_to_standard_output_and_nothing_else(cli: CommandLine) -> None:
    """Guards against figures in the text: `dflash generate > file` must hold the answer alone."""
    outcome = cli.run("generate", "hi")
    assert (outcome.code, outcome.out, outcome.err) == (0, "Hello, world.\n", "")
    assert cli.engine.calls[0]["prompt"] == "hi"


@pytest.mark.parametrize("words", [["generate"], ["generate", "-"]])
def test_prompt_from_standard_input(cli: CommandLine, words: list[str]) -> None:
    """Guards against a prompt with the shell's line break at its end, which changes the answer."""
    cli.run(*words, stdin="Two\nlines\n")
    assert cli.engine.calls[0]["prompt"] == "Two\nlines"


def test_standard_input_that_is_not_utf8(cli: CommandLine) -> None:
    """Guards against a UnicodeDecodeError, or lone surrogates that no tokenizer takes."""
    outcome = cli.run("generate", stdin=b"caf\xe9")
    assert outcome.code == 0
    assert cli.engine.calls[0]["prompt"] == "caf\N{REPLACEMENT CHARACTER}"


def test_text_is_not_markup(cli: CommandLine) -> None:
    """Guards against a console library that swallows brackets of generated code."""
    cli.engine.answers = ("a[bold]b = [1][0]",)
    assert cli.run("generate", "hi").out == "a[bold]b = [1][0]\n"


def test_streaming_and_not_streaming_say_the_same(cli: CommandLine) -> None:
    """Guards against pieces lost or doubled by either way of printing."""
    assert cli.run("generate", "hi", "--no-stream").out == cli.run("generate", "hi").out


def test_system_message_makes_a_conversation(cli: CommandLine) -> None:
    """Guards against a system message that is accepted and dropped."""
    cli.run("generate", "hi", "--system", "Be brief.")
    assert cli.engine.calls[0]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_raw_reaches_the_engine_and_excludes_system(cli: CommandLine) -> None:
    """Guards against --raw being ignored, and against --system being ignored beside it."""
    cli.run("generate", "hi", "--raw")
    assert cli.engine.calls[0]["raw"] is True
    outcome = cli.run("generate", "hi", "--raw", "--system", "S")
    assert outcome.code == 2
    assert "--system" in outcome.err


def test_json_record(cli: CommandLine) -> None:
    """Guards against a record that is not one line of JSON with ids, figures and what ran."""
    outcome = cli.run("generate", "hi", "--json")
    assert outcome.out.count("\n") == 1
    record = json.loads(outcome.out)
    assert record["text"] == "Hello, world."
    assert record["token_ids"] == [ord(character) for character in "Hello, world."]
    assert record["finish_reason"] == "length"
    assert record["stats"]["acceptance_length"] == pytest.approx(3.0)
    assert record["stats"]["num_tokens"] == 13
    assert record["engine"]["target"] == "fake"
    assert record["engine"]["exact"] is True
    assert "rounds" not in record


def test_json_of_a_single_token_has_no_nan(cli: CommandLine) -> None:
    """Guards against NaN (no decode round yet), which is no JSON."""
    outcome = cli.run("generate", "hi", "--json", "-n", "1")
    assert "NaN" not in outcome.out
    assert json.loads(outcome.out)["stats"]["acceptance_length"] is None


def test_profile_splits_each_round(cli: CommandLine) -> None:
    """Guards against a split that does not add up to the round, or goes into the text."""
    outcome = cli.run("generate", "hi", "--profile", "--json")
    rounds = json.loads(outcome.out)["rounds"]
    assert len(rounds) == 5
    for step in rounds[1:]:
        assert step["draft_seconds"] == DRAFT_SECONDS
        assert step["verify_seconds"] == VERIFY_SECONDS
        assert step["other_seconds"] == pytest.approx(ROUND_SECONDS - DRAFT_SECONDS - VERIFY_SECONDS)
    shown = cli.run("generate", "hi", "--profile")
    assert shown.out == "Hello, world.\n"
    assert "verify" in shown.err
    assert "80.0%" in shown.err
    cli.run("generate", "hi")
    assert [call["profile"] for call in cli.engine.calls] == [True, True, False]  # it costs speed on a GPU


def test_no_prompt_at_all(cli: CommandLine) -> None:
    """Guards against waiting for a model, or generating from nothing, when input is empty."""
    outcome = cli.run("generate")
    assert outcome.code == 2
    assert "prompt" in outcome.err
    assert not cli.loads


@pytest.mark.parametrize("words", [["--json"], ["--no-stream"], ["--json", "--no-stream"]])
def test_a_sign_of_life_where_nothing_is_streamed(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Guards against minutes of silence on a terminal, and against a spinner in a file or in the text: it tells the
    tokens so far on standard error, and only if that is a terminal."""
    silent = cli.run("generate", "hi", *words)
    assert silent.err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # for the console library: this is a terminal
    monkeypatch.setenv("TERM", "xterm")
    shown = cli.run("generate", "hi", *words)
    assert "13 tokens" in shown.err
    assert shown.out == silent.out
    assert "tokens" not in cli.run("generate", "hi").err, "the text itself is the sign of life"
