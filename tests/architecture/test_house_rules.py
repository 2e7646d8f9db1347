"""Rules of the house that can be read off the source: sizes, prints, environment, globals, broad excepts, patches.

Exceptions are listed here with their reason, so that a new one is a decision and not an accident.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "dflash"
SOURCES = sorted(PACKAGE.rglob("*.py"))
ALL_FILES = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "scripts").rglob("*.py"))]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 6
LONG_FUNCTIONS: dict[str, str] = {}
MANY_POSITIONAL = {
    "src/dflash/train/losses.py:forward": "an autograd.Function gets its inputs by position",
}
READS_ENVIRONMENT = {"cache.py": "the one place that reads where the cache is"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(path: Path) -> ast.Module:
    """Parsed once for all rules, none of which changes it."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def dotted(node: ast.AST) -> str:
    """ "a.b.c" for a chain of names, "" for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def functions(path: Path) -> Iterator[Function]:
    return (node for node in nodes_of(path) if isinstance(node, Function))


def num_code_lines(function: Function) -> int:
    """Length without the docstring: explaining more must not cost anything."""
    length = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    documented = ast.get_docstring(function) is not None
    return length - ((first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0)


def offences(wrong: Callable[[ast.AST], bool], paths: list[Path] = SOURCES) -> list[str]:
    """'file:line' of every node that is wrong."""
    return [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        for path in paths
        for node in nodes_of(path)
        if wrong(node)
    ]


def in_library(path: Path) -> bool:
    return not {"cli", "launch"} & set(path.relative_to(PACKAGE).parts)


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_length(path: Path) -> None:
    """Guards against files that do six jobs."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


def test_function_length_and_arguments() -> None:
    """Guards against functions that nobody can hold in mind at once, and calls of seven bare values."""
    too_long: set[str] = set()
    too_many: set[str] = set()
    for path in ALL_FILES:
        for function in functions(path):
            place = f"{path.relative_to(ROOT)}:{function.name}"
            if num_code_lines(function) > MAX_FUNCTION_LINES:
                too_long.add(place)
            arguments = [*function.args.posonlyargs, *function.args.args]
            if len([one for one in arguments if one.arg not in ("self", "cls", "ctx")]) > MAX_POSITIONAL:
                too_many.add(place)
    assert too_long == set(LONG_FUNCTIONS), "split the function, or take the exception that is no longer needed off"
    assert too_many == set(MANY_POSITIONAL), "make parameters keyword-only, or take the exception off"


def test_the_library_never_prints() -> None:
    """Guards against output that a program using the library cannot switch off."""
    library = [path for path in SOURCES if in_library(path)]
    assert not offences(
        lambda node: isinstance(node, ast.Call) and dotted(node.func) in ("print", "sys.stdout.write"), library
    )


def test_environment_variables_are_read_in_one_place() -> None:
    """Guards against configuration by environment variables."""
    library = [path for path in SOURCES if in_library(path) and path.name not in READS_ENVIRONMENT]
    assert not offences(
        lambda node: (
            isinstance(node, ast.Attribute) and dotted(node) in ("os.environ", "os.getenv", "os.putenv", "os.environb")
        ),
        library,
    )
    for name in READS_ENVIRONMENT:
        assert "os.environ" in (PACKAGE / name).read_text(encoding="utf-8"), f"{name} no longer needs its exception"


def test_no_globals() -> None:
    """Guards against state of the process that two engines would share."""
    assert not offences(lambda node: isinstance(node, ast.Global))


def test_no_broad_except_without_raise() -> None:
    """Guards against faults of ours that are swallowed."""

    def wrong(node: ast.AST) -> bool:
        if not isinstance(node, ast.ExceptHandler):
            return False
        broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
        return broad and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))

    assert not offences(wrong)


def test_no_patching_of_other_packages() -> None:
    """Guards against assignments to attributes of imported modules: they drift from upstream, process-wide."""
    found = []
    for path in SOURCES:
        tree = tree_of(path)
        modules = {
            (alias.asname or alias.name).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        found += [
            f"{path.relative_to(ROOT)}:{target.lineno} {ast.unparse(target)}"
            for target in _assigned(tree)
            if isinstance(target, ast.Attribute) and ast.unparse(target).split(".")[0] in modules
        ]
    assert not found


def _assigned(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            yield node.target


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_file_says_what_it_knows(path: Path) -> None:
    """Guards against files without a docstring (empty `__init__.py` excepted), and public functions without one."""
    tree = tree_of(path)
    assert ast.get_docstring(tree) or not tree.body
    silent = [
        node.name
        for node in tree.body
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not silent


def test_one_vocabulary() -> None:
    """Guards against a second word for target (as used by other programs), which readers take for another thing."""
    foreign = ("verifier", "posterior", "ea_model")
    found = [
        (path.name, word)
        for path in SOURCES
        if path.parent.name != "dialects"  # these must name the keys of other programs
        for word in foreign
        if word in path.read_text(encoding="utf-8").lower()
    ]
    assert not found


def test_citations_can_be_followed() -> None:
    """Guards against references to notes that no reader of this repository has: its own pages and papers only."""
    texts = [*ALL_FILES, *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").glob("*.yaml")]
    foreign = re.compile(r"(?<!arXiv:\d{4}\.\d{5} )\N{SECTION SIGN}\d|\bpitfalls? [A-F]\d")
    assert not [(path.name, found) for path in texts for found in foreign.findall(path.read_text(encoding="utf-8"))]


def test_nothing_of_the_developers_machine() -> None:
    """Guards against paths that exist on one machine only."""
    texts = [*ALL_FILES, *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "Makefile", ROOT / ".ci/run"]
    private = ("/wor" + "k/", "/ro" + "ot/", "/hom" + "e/")
    assert not [(path.name, word) for path in texts for word in private if word in path.read_text(encoding="utf-8")]


def test_tree_in_the_readme() -> None:
    """Guards against a map of the code that shows what is gone or hides what is new."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = readme.split("src/dflash/\n", 1)[1].split("```", 1)[0]
    shown = {line.split()[0].rstrip("/") for line in block.splitlines() if line.strip()}
    there = {path.name for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed")}
    assert shown == there - {"__init__.py", "__main__.py"}


def test_dependencies_are_those_that_are_imported() -> None:
    """Guards against a package that works only where the developers' tools happen to be installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [one for name, extra in project["optional-dependencies"].items() if name != "dev" for one in extra]
    required = {_import_name(requirement) for requirement in project["dependencies"]}
    optional = {_import_name(requirement) for requirement in extras}
    used = {name for path in SOURCES for name in _imported(tree_of(path))} - sys.stdlib_module_names - {"dflash"}
    assert used <= required | optional
    through_transformers = {"accelerate", "gguf"}  # which imports them when it reads a GGUF file
    assert required - used <= through_transformers


def _import_name(requirement: str) -> str:
    name = re.split(r"[<>=~!;\[ ]", requirement)[0].lower().replace("-", "_")
    return {"pyyaml": "yaml"}.get(name, name)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Top-level names of everything that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.split(".")[0]


def aliases() -> Iterator[tuple[str, str, str]]:
    """(name, definition, file) of every type alias; files of two backends that mirror each other count as one."""
    for path in SOURCES:
        place = re.sub(r"^backends/[a-z]+/", "backends/*/", str(path.relative_to(PACKAGE)))
        for node in tree_of(path).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
                name = ast.unparse(node.targets[0])
                if re.fullmatch(r"[A-Z][A-Za-z]*[a-z][A-Za-z]*", name):
                    yield name, ast.unparse(node.value), place


def test_a_type_has_one_name_and_one_place() -> None:
    """Guards against the same alias written in several modules, where it drifts apart, and against a class of the same
    name, which a reader takes for it."""
    found = list(aliases())
    assert len(found) > 20
    for what in (0, 1):
        places: dict[str, set[str]] = {}
        for alias in found:
            places.setdefault(alias[what], set()).add(alias[2])
        assert not {one: where for one, where in places.items() if len(where) > 1}
    classes = {node.name for path in SOURCES for node in tree_of(path).body if isinstance(node, ast.ClassDef)}
    assert not classes & {name for name, _, _ in found}
    clock = re.compile(re.escape("Callable[[], float]"))
    assert [path.name for path in SOURCES if clock.search(path.read_text(encoding="utf-8"))] == ["types.py"]
