"""Whatever a user does wrong: exit code 2, one line on standard error, nothing on standard output, no traceback."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dflash.cli.main import COMMANDS
from dflash.errors import DFlashError, MissingExtra
from tests.cli.fakes import CommandLine

ROOT = Path(__file__).parents[2]


def dflash(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a user runs it."""
    command = [sys.executable, "-m", "dflash", *words]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("words", "part", "page"),
    [
        (["nonsense"], "'nonsense'", "dflash"),
        (["--nonsense"], "--nonsense", "dflash"),
        (["generate", "--nonsense"], "--nonsense", "dflash generate"),
        (["generate", "a", "b"], "(b)", "dflash generate"),
        (["generate", "hi", "--top-k", "many"], "'--top-k'", "dflash generate"),
        (["generate", "hi", "-n"], "'-n'", "dflash generate"),
        (["prepare"], "prompts", "dflash prepare"),
        (["prepare", "p.jsonl"], "--out", "dflash prepare"),
        (["train"], "recipe", "dflash train"),
        (["demo", "--repeats", "0"], "--repeats", "dflash demo"),
    ],
)
def test_usage_errors(cli: CommandLine, words: list[str], part: str, page: str) -> None:
    """Guards against a usage error that loads a model first, leaves with another code, or comes as a drawn box that a
    log file cannot hold; it names the page of help that lists what there is."""
    outcome = cli.run(*words)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("dflash: error: ")
    assert outcome.err.count("\n") == 1
    assert part in outcome.err
    assert f"`{page} --help`" in outcome.err
    assert not cli.loads


def test_a_mistyped_command(cli: CommandLine) -> None:
    """Guards against a refusal that leaves the user to look the name up."""
    assert cli.run("generte").err == "dflash: error: there is no command 'generte'; did you mean generate?\n"


def test_no_words_at_all(cli: CommandLine) -> None:
    """Guards against help that a script takes for success, and against a version or help that is no success."""
    outcome = cli.run()
    assert (outcome.code, outcome.err) == (2, "")
    assert "Usage: dflash" in outcome.out
    assert cli.run("--help").code == cli.run("--version").code == cli.run("generate", "--help").code == 0


def test_ctrl_c(cli: CommandLine) -> None:
    """Guards against a traceback, and against the code of success, when a user has had enough while a model loads."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash.load", interrupt)
        outcome = cli.run("generate", "hi")
    assert outcome.code in (1, 130)
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["generate", "hi", "--top-p", "3"], "top_p"),
        (["generate", "hi", "-n", "0"], "max_new_tokens"),
        (["generate", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "hi", "--stop", ""], "stop string"),
        (["generate", "hi", "--logit-bias", "x"], "--logit-bias"),
        (["generate", "hi", "--stop-token-id", "-1"], "stop_token_ids holds -1"),
        (["chat", "--min-p", "2"], "min_p"),
        (["demo", "--prompts", "missing.jsonl"], "missing.jsonl"),
        (["demo", "--limit", "0"], "limit"),
        (["generate", "this is too long"], "longer than the context"),
    ],
)
def test_values_out_of_range(cli: CommandLine, words: list[str], part: str) -> None:
    """Guards against errors of the library that lose their cure, or come as more than a line."""
    outcome = cli.run(*words)
    assert outcome.code == 2
    assert outcome.err.startswith("dflash: error: ")
    assert part in outcome.err
    assert outcome.err.count("\n") == 1
    assert outcome.out == ""


@pytest.mark.parametrize(
    "error",
    [MissingExtra("not installed: run\n  pip install x\nor give a folder."), PermissionError(13, "denied", "/x")],
)
@pytest.mark.parametrize("verb", ["generate", "chat", "demo"])
def test_errors_while_loading(cli: CommandLine, monkeypatch: pytest.MonkeyPatch, error: Exception, verb: str) -> None:
    """Guards against a command that forgets to report, and against messages of several lines."""

    def load(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("dflash.load", load)
    outcome = cli.run(verb, *(["hi"] if verb == "generate" else []))
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("dflash: error: ")


def test_our_own_faults_keep_their_traceback(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a catch-all that turns bugs into one polite line."""

    def load(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("dflash.load", load)
    with pytest.raises(ZeroDivisionError):
        cli.run("generate", "hi")


def test_warnings_of_the_library_are_lines(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against warnings that vanish (no logging set up) or that stay switched on for the caller's process."""
    logger = logging.getLogger("dflash")
    before = (logger.level, list(logger.handlers))

    def warn(index: int) -> None:
        if index == 0:
            logger.getChild("x").warning("near-ties\nmay differ")

    cli.engine.during = warn
    assert "dflash: warning: near-ties may differ\n" in cli.run("generate", "hi").err
    assert (logger.level, list(logger.handlers)) == before


def test_every_error_of_the_tree_is_caught(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an error class outside the tree: all of `errors.py` must derive from DFlashError."""
    import dflash.errors as errors

    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(classes) > 5
    assert all(issubclass(kind, DFlashError) for kind in classes)


def test_a_real_process(tmp_path: Path) -> None:
    """Guards against what the in-process tests cannot see: the entry point, `python -m`, tracebacks at exit."""
    missing = dflash("generate", "--target", str(tmp_path / "nowhere"), "hi")
    assert missing.returncode == 2
    (line,) = missing.stderr.splitlines()
    assert line.startswith("dflash: error: target ")
    assert missing.stdout == ""


PRESSED = """
import signal, sys
pressed_at = None
from importlib.metadata import EntryPoint

class PressCtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == pressed_at:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, PressCtrlC())
entry, *modules = sys.argv[1:]
sys.argv[1:] = ["models"]
main = EntryPoint("dflash", entry, "console_scripts").load()
for pressed_at in modules:
    for name in [name for name in sys.modules if name.startswith("dflash.cli")]:
        del sys.modules[name]
    assert pressed_at not in sys.modules, pressed_at
    try:
        main()
    except SystemExit as leave:
        assert leave.code == 130, (pressed_at, leave.code)
    else:
        raise AssertionError(pressed_at)
"""


def test_ctrl_c_while_the_command_line_is_imported() -> None:
    """Fault: a traceback of imports for whoever changes his mind within the first tenth of a second. Pressed where the
    command line itself, a library of it or a verb begins to be imported, in the order in which that happens."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        entry = tomllib.load(file)["project"]["scripts"]["dflash"]
    modules = ["dflash.cli", "dflash.cli.main", "typer", "typer.core", "dflash.cli.errors", "dflash.cli.models"]
    words = [sys.executable, "-c", PRESSED, entry, *modules]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_python_m_is_the_same_command() -> None:
    """Fault: `python -m dflash` has an entry of its own, where Ctrl-C is a traceback."""
    code = PRESSED.split("entry")[0] + "pressed_at = 'typer'; import runpy; runpy.run_module('dflash', {}, '__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


HELP = """
import sys
from dflash.cli.main import COMMANDS, main

help_pages = [([*verb, "--help"], 0) for verb in ((), *((verb,) for verb in COMMANDS))]
missing = [(["generate", "--" + role, "./nowhere", "hi"], 2) for role in ("target", "draft")]
for words, code in (*help_pages, *missing):
    try:
        left = main(words)
    except SystemExit as leave:
        left = leave.code
    assert (left or 0) == code, (words, left)
    heavy = {"torch", "transformers", "numpy", "huggingface_hub", "safetensors"} & set(sys.modules)
    assert not heavy, (words, heavy)
"""


def test_help_and_missing_files_answer_without_heavy_imports() -> None:
    """Guards against `--help`, or the answer to a mistyped path, that takes seconds because torch was imported for it.
    All in one process: what one verb imported is there as long as nothing takes it out again, and it is named."""
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for page in ("dflash", *(f"dflash {verb}" for verb in COMMANDS)):
        assert f"Usage: {page} [OPTIONS]" in done.stdout
    assert [line.split(" does not exist")[0] for line in done.stderr.splitlines()] == [
        f"dflash: error: {role} './nowhere'" for role in ("target", "draft")
    ]
