"""The documents say what the code does: pages written from the code, commands that parse, examples that import.

README and docs are the first thing that drifts from the code: flags are listed that no command has.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import dflash
from dflash.cli.main import COMMANDS, load_command
from dflash.prepare.prompts import read_prompts
from dflash.train.config import TrainConfig
from scripts.write_docs import CLI_PAGE, TRAINING_PAGE, render_cli, render_training
from tests.cli.fakes import CommandLine

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RENEW = "run `make format`"


def blocks(page: Path, language: str = "") -> list[str]:
    """Contents of the fenced blocks of a page that are marked with `language`."""
    return [text for mark, text in FENCE.findall(page.read_text(encoding="utf-8")) if mark == language]


def commands(page: Path) -> Iterator[list[str]]:
    """The words after `dflash` of each command in a page's unmarked blocks, up to a pipe, redirection or comment."""
    for line in "".join(blocks(page)).splitlines():
        for part in line.split("|"):
            if not part.strip().startswith("dflash ") or "[OPTIONS]" in part:
                continue
            words = shlex.split(part, comments=True)
            if words[1:]:
                yield words[1 : words.index(">") if ">" in words else None]


def test_command_line_page() -> None:
    """Guards against options in the page that do not exist, or the other way round."""
    assert CLI_PAGE.read_text(encoding="utf-8") == render_cli(), RENEW


def test_recipe_keys() -> None:
    """Guards against recipe keys in the page that do not exist, or the other way round."""
    page = TRAINING_PAGE.read_text(encoding="utf-8")
    assert page == render_training(page), RENEW


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_shows_what_the_page_shows(cli: CommandLine, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a page made from something else than what `--help` prints."""
    monkeypatch.setenv("COLUMNS", "200")
    shown = " ".join(cli.run(verb, "--help").out.split())
    page = CLI_PAGE.read_text(encoding="utf-8").split(f"## `dflash {verb}`")[1].split("\n## ")[0]
    options = re.findall(r"`(--[\w-]+)", page)
    assert options
    for option in options:
        assert option in shown
    for param in load_command(verb).params:
        assert " ".join((param.help or "").split()) in shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path) -> None:
    """Guards against commands in the documents that the command line would refuse."""
    for words in commands(page):
        assert words[0] in COMMANDS, words
        load_command(words[0]).make_context(words[0], list(words[1:]))


def test_commands_are_found() -> None:
    """Guards against the test above passing because it found nothing."""
    found = [words[0] for words in commands(ROOT / "README.md")]
    assert len(found) >= 8
    assert set(found) == set(COMMANDS)


def test_first_commands_of_the_readme_are_targets_of_make() -> None:
    """Guards against a README whose first two commands do not exist."""
    first = next(block for block in blocks(ROOT / "README.md") if "make" in block)
    words = re.findall(r"^make (\w+)", first, re.MULTILINE)
    assert words == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    mentioned = {word for page in PAGES for word in re.findall(r"\bmake ([a-z-]+)", "".join(blocks(page)))}
    for word in {*words, *mentioned}:
        assert re.search(rf"^{word}:", makefile, re.MULTILINE), word


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/python-api.md"], ids=lambda page: page.name)
def test_python_examples(page: Path) -> None:
    """Guards against examples that do not compile or import names that are not public."""
    examples = blocks(page, "python")
    assert examples
    for example in examples:
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom):
                assert node.module == "dflash"
                assert {alias.name for alias in node.names} <= set(dflash.__all__)


def test_readme_example_runs(cli: CommandLine, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against an example that uses attributes which results do not have."""
    (example,) = blocks(ROOT / "README.md", "python")
    assert len(example.splitlines()) <= 12
    exec(compile(example.replace('load("smollm2-135m")', "engine"), "README", "exec"), {"engine": cli.engine})
    assert "tokens per round" in capsys.readouterr().out


def test_recipe_and_prompts_of_the_training_page(tmp_path: Path) -> None:
    """Guards against a recipe that the trainer refuses, and prompt forms that the reader does not know."""
    (recipe,) = blocks(TRAINING_PAGE, "yaml")
    TrainConfig.model_validate(yaml.safe_load(recipe))
    (lines,) = blocks(TRAINING_PAGE, "json")
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines, encoding="utf-8")
    assert len(read_prompts(path)) == len([json.loads(line) for line in lines.splitlines()])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_links_exist(page: Path) -> None:
    """Guards against pages that point to files which were moved or never written."""
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    for link in links:
        assert link.startswith("https://") or (page.parent / link).exists(), link
    for path in re.findall(r"\b(?:src|tests|docs|scripts|recipes)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:core|backends|prepare|train|cli)/[\w./-]+\.py)`", text):
        assert (ROOT / "src/dflash" / path).exists(), path


def test_scripts_run_as_scripts() -> None:
    """Guards against a script that only works when it is imported by a test."""
    code = "import runpy; runpy.run_path('scripts/write_docs.py')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
