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


def guarded(tree: ast.Module) -> Iterator[tuple[str, int, set[str]]]:
    """(parser, line, errors that a `try` around its call catches) of every file or text that is parsed."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in (
            "json.loads",
            "json.load",
            "yaml.safe_load",
        ):
            continue
        caught: set[str] = set()
        inner: ast.AST = node
        while inner in parents:
            outer = parents[inner]
            if isinstance(outer, ast.Try) and inner in outer.body:
                for handler in outer.handlers:
                    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
                    caught |= {ast.unparse(kind) for kind in kinds if kind is not None}
            inner = outer
        yield ast.unparse(node), node.lineno, caught


def test_parsers_are_guarded() -> None:
    """Guards against the next reader that forgets one of the two errors that parsers raise."""
    found, own = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for call, line, caught in guarded(ast.parse(path.read_text(encoding="utf-8"))):
            own += "model_dump_json" in call
            if "model_dump_json" in call or "_loading_errors" in path.read_text(encoding="utf-8"):
                continue  # what we wrote a moment ago; what the loader of models guards as a whole
            if not ("ValueError" in caught and caught & {"RecursionError", "RuntimeError"}):
                found.append(f"{path.relative_to(PACKAGE)}:{line} {call}")
    assert not found
    assert own
