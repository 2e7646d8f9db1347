"""Files and values that nobody writes by hand, given to the commands that read them: one line, no traceback."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.fakes import CommandLine

PACKAGE = Path(__file__).parents[2] / "src" / "dflash"
DEEP = "[" * 100_000
"""Deeper than Python's parsers go; they answer with a RecursionError, which is no ValueError."""


def one_line(cli: CommandLine, *words: str) -> str:
    outcome = cli.run(*words)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("dflash: error: ")
    assert outcome.err.count("\n") == 1
    return outcome.err


@pytest.mark.parametrize("text", [DEEP, '{"prompt": ' + 5000 * "9" + "}", '{"prompt": NaN}', "\ufeff{}", "\0"])
@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--prompts", "FILE"],
        ["prepare", "FILE", "--out", "OUT"],
        ["bench", "--dataset", "FILE", "--out", "OUT"],
        ["report", "FILE"],
    ],
    ids=lambda words: words[0],
)
def test_odd_json(cli: CommandLine, tmp_path: Path, words: list[str], text: str) -> None:
    """Fault: a traceback for a file that is nested without end, or holds a number without end."""
    file = tmp_path / "file.jsonl"
    file.write_text(text + "\n", encoding="utf-8")
    places = {"FILE": str(file), "OUT": str(tmp_path / "out")}
    assert "file.jsonl" in one_line(cli, *(places.get(word, word) for word in words))


@pytest.mark.parametrize("value", ["[" * 600, "2026-13-45", "!!python/object/apply:os.system [ls]", "&x [*x", "\0"])
def test_odd_yaml(cli: CommandLine, tmp_path: Path, value: str) -> None:
    """Fault: YAML's parser says what is wrong by errors that are none of YAML's: a day that no month has, brackets
    without end."""
    recipe, plain = tmp_path / "recipe.yaml", tmp_path / "plain.yaml"
    recipe.write_text(f"steps: {value}\n", encoding="utf-8")
    plain.write_text("steps: 1\n", encoding="utf-8")
    assert "recipe.yaml is not valid YAML" in one_line(cli, "train", str(recipe))
    assert "the value is not valid YAML" in one_line(cli, "train", str(plain), f"seed={value}")


@pytest.mark.parametrize("url", ["http://[::1", "http://\ud800", "http://a:99999999", "http://a b:x", "http://a\nb"])
def test_odd_addresses(cli: CommandLine, tmp_path: Path, url: str) -> None:
    """Fault: an address that the HTTP library cannot take apart."""
    words = ["bench", "--backend", "openai", "--url", url, "--model", "m", "--out", str(tmp_path / "out")]
    assert "write it as http://host:port" in one_line(cli, *words)


@pytest.mark.parametrize("key", ["kéy", "a\nb"])
def test_odd_keys(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Fault: a key that no header can hold, repeated in an error of the HTTP library."""
    monkeypatch.setenv("SERVER_KEY", key)
    words = ["bench", "--backend", "openai", "--url", "http://127.0.0.1:9", "--api-key-env", "SERVER_KEY"]
    assert key not in one_line(cli, *words, "--out", str(tmp_path / "out"))


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1"])
def test_a_time_without_end(cli: CommandLine, seconds: str) -> None:
    """Fault: a command that never ends."""
    assert "--seconds" in one_line(cli, "calibrate", "--seconds", seconds)
    assert not cli.loads


@pytest.mark.parametrize("temperature", ["1e-300", "nan", "inf", "-1"])
def test_temperatures_that_leave_the_numbers(cli: CommandLine, tmp_path: Path, temperature: str) -> None:
    """Fault: logits that are divided by next to nothing, infinite, and a traceback of the sampler."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hi"}\n')
    words = ["prepare", str(prompts), "--out", str(tmp_path / "out"), "--temperature", temperature]
    assert "temperature must be 0 (greedy) or at least" in one_line(cli, *words)


PARSERS = ("json.loads", "json.load", "yaml.safe_load")


def caught_by(handlers: list[ast.ExceptHandler]) -> set[str]:
    """Names of the errors that these clauses catch."""
    kinds = [handler.type for handler in handlers]
    single = [part for kind in kinds for part in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
    return {ast.unparse(kind) for kind in single if kind is not None}


def context_guards(tree: ast.Module) -> dict[str, set[str]]:
    """Context managers of this file -> errors of their block that they catch."""
    guards: dict[str, set[str]] = {}
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        for node in (one for one in ast.walk(function) if isinstance(one, ast.Try)):
            if any(isinstance(one, ast.Yield) for part in node.body for one in ast.walk(part)):
                guards.setdefault(function.name, set()).update(caught_by(node.handlers))
    return guards


def guarded(tree: ast.Module) -> Iterator[tuple[str, int, set[str]]]:
    """(parser, line, errors that are caught around its call, by a `try` or by a `with` of a context manager of the same
    file) of every file or text that is parsed."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    guards = context_guards(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) in PARSERS):
            continue
        caught: set[str] = set()
        inner: ast.AST = node
        while inner in parents:
            outer = parents[inner]
            if isinstance(outer, ast.Try) and inner in outer.body:
                caught |= caught_by(outer.handlers)
            if isinstance(outer, ast.With) and inner in outer.body:
                calls = [one.context_expr for one in outer.items if isinstance(one.context_expr, ast.Call)]
                caught = caught.union(*(guards.get(ast.unparse(call.func), set()) for call in calls))
            inner = outer
        yield ast.unparse(node), node.lineno, caught


def unguarded(source: str) -> list[str]:
    """Calls of parsers, with their lines, whose file may be anybody's and whose errors nobody catches. What pydantic
    wrote a moment ago is nobody else's."""
    return [
        f"{line} {call}"
        for call, line, caught in guarded(ast.parse(source))
        if "model_dump_json" not in call
        and not ("ValueError" in caught and caught & {"RecursionError", "RuntimeError"})
    ]


def test_parsers_are_guarded() -> None:
    """Guards against the next reader that forgets one of the two errors that parsers raise."""
    files = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    assert not [f"{path.relative_to(PACKAGE)}:{one}" for path, source in files.items() for one in unguarded(source)]


LOADER = """
@contextmanager
def _errors():
    try:
        yield
    except ValueError as error:
        raise Refused from error
    except (OSError, RuntimeError) as error:
        raise Refused from error

def load(path):
    with _errors():
        return json.loads(path.read_text())
"""
READER = """
def read(path):
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError):
        return None
"""


def test_the_guards_are_seen() -> None:
    """Guards against an exemption for a whole file: beside a guarded call of the same file one is not, or its guard
    catches too little."""
    assert unguarded(LOADER) == unguarded(READER) == []
    for beside in (
        "def other(text):\n    return json.loads(text)",
        "def other(text):\n    with open(text) as file:\n        return json.load(file)",
        "def other(text):\n    try:\n        pass\n    except (ValueError, RecursionError):\n        json.loads(text)",
        "def other(text):\n    with _errors():\n        pass\n    return yaml.safe_load(text)",
    ):
        assert len(unguarded(LOADER + beside)) == 1, beside
    assert len(unguarded(LOADER.replace("ValueError", "KeyError"))) == 1
    assert len(unguarded(LOADER.replace("OSError, RuntimeError", "OSError"))) == 1
    assert len(unguarded(READER.replace(", RecursionError", ""))) == 1
    assert len(unguarded("def f(config):\n    return json.loads(config.model_dump_json())")) == 0
