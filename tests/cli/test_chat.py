"""`dflash chat`: the conversation goes on whatever happens to one answer."""

from __future__ import annotations

import signal

from tests.cli.fakes import CommandLine


def messages(call: dict[str, object]) -> list[tuple[str, str]]:
    prompt = call["prompt"]
    assert isinstance(prompt, list)
    return [(message["role"], message["content"]) for message in prompt]


def test_turns_build_on_one_another(cli: CommandLine) -> None:
    """Guards against a chat that forgets what was said."""
    cli.engine.answers = ("First.", "Second.")
    outcome = cli.run("chat", "--system", "Be brief.", stdin="one\n\ntwo\n")
    assert outcome.code == 0
    assert outcome.out == "First.\nSecond.\n"
    assert messages(cli.engine.calls[1]) == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "First."),
        ("user", "two"),
    ]


def test_exit_leaves_at_once(cli: CommandLine) -> None:
    """Guards against answering what comes after /exit, or answering /exit itself."""
    assert cli.run("chat", stdin="/exit\nmore\n").code == 0
    assert not cli.engine.calls


def test_reset_forgets(cli: CommandLine) -> None:
    """Guards against old turns, or old figures, after /reset."""
    outcome = cli.run("chat", stdin="one\n/reset\n/stats\ntwo\n")
    assert messages(cli.engine.calls[1]) == [("user", "two")]
    assert "No answer yet." in outcome.out


def test_stats_help_and_unknown_commands(cli: CommandLine) -> None:
    """Guards against commands that are sent to the model as messages."""
    outcome = cli.run("chat", stdin="/nonsense\none\n/stats\n/help\n")
    assert len(cli.engine.calls) == 1
    assert "Unknown command /nonsense" in outcome.out
    assert "answer 1: 13 tokens" in outcome.out
    assert "3.00 tokens per round" in outcome.out
    assert "/reset" in outcome.out


def test_ctrl_c_stops_the_answer_and_keeps_the_session(cli: CommandLine) -> None:
    """Guards against losing the session, or what was already said, by one Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)

    def press_once(index: int) -> None:
        if index == 2 and len(cli.engine.calls) == 1:
            signal.raise_signal(signal.SIGINT)

    cli.engine.during = press_once
    outcome = cli.run("chat", stdin="one\ntwo\n")
    assert outcome.out == "Hello,  [stopped]\nHello, world.\n"
    assert messages(cli.engine.calls[1]) == [("user", "one"), ("assistant", "Hello, "), ("user", "two")]
    assert signal.getsignal(signal.SIGINT) is handler


def test_second_ctrl_c_does_not_wait_for_the_round(cli: CommandLine) -> None:
    """Guards against a long prefill that cannot be interrupted, and against a handler left behind."""
    handler = signal.getsignal(signal.SIGINT)

    def press_twice(index: int) -> None:
        if index == 0 and len(cli.engine.calls) == 1:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    cli.engine.during = press_twice
    outcome = cli.run("chat", stdin="one\ntwo\n")
    assert outcome.code == 0
    assert messages(cli.engine.calls[1]) == [("user", "two")], "an answer that never began leaves no turn"
    assert signal.getsignal(signal.SIGINT) is handler


def test_conversation_that_no_longer_fits(cli: CommandLine) -> None:
    """Guards against one refused prompt ending the session or staying in the conversation."""
    outcome = cli.run("chat", stdin="one\nthis is too long\ntwo\n")
    assert outcome.code == 0
    assert "/reset" in outcome.err
    assert ("user", "this is too long") not in messages(cli.engine.calls[1])
    assert len(cli.engine.calls) == 2
