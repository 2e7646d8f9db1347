"""Every row of the table names tests that exist and really assert something."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.pitfalls import mutations_a, mutations_b
from tests.pitfalls.mutation import Mutation
from tests.pitfalls.table import TABLE

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src" / "dflash"
MUTATIONS = mutations_a.MUTATIONS + mutations_b.MUTATIONS
ROWS = [*(f"A{number}" for number in range(1, 17)), *(f"B{number}" for number in range(1, 19)), "B2b"]


@cache
def functions(file: str) -> dict[str, ast.FunctionDef]:
    """Top-level tests of a file."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_is_there() -> None:
    """Guards against a fault that was forgotten."""
    assert set(TABLE) == set(ROWS)


@pytest.mark.parametrize("row", TABLE)
def test_named_tests_exist_and_run(row: str) -> None:
    """Guards against a table that names tests which were renamed, emptied or switched off."""
    assert TABLE[row].symptom
    assert TABLE[row].tests
    for name in TABLE[row].tests:
        file, _, function = name.partition("::")
        assert function.startswith("test_")
        test = functions(file)[function]
        marks = [ast.unparse(decorator) for decorator in test.decorator_list]
        assert not {"pytest.mark.skip", "pytest.mark.xfail"} & {mark.split("(")[0] for mark in marks}, name
        assert asserts(functions(file), test), f"{name} asserts nothing"


def test_every_row_has_been_broken() -> None:
    """Guards against a row whose tests nobody has ever seen fail."""
    assert {mutation.row for mutation in MUTATIONS} == set(TABLE)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.row}: {mutation.what}")
def test_mutations_fit_the_sources(mutation: Mutation) -> None:
    """Guards against a proof that rots: what `make prove-pitfalls` replaces must be there once, what it makes of it
    must be a program, and what it runs must be the row's tests."""
    text = (SOURCES / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old
    ast.parse(text.replace(mutation.old, mutation.new))
    assert mutation.tests
    assert {test.partition("[")[0] for test in mutation.tests} <= set(TABLE[mutation.row].tests)


def asserts(beside: dict[str, ast.FunctionDef], function: ast.FunctionDef) -> bool:
    """Whether a function asserts something, by itself or through a helper beside it."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "pytest.raises" or "assert_" in called:
                return True
            helper = beside.get(called)
            if helper is not None and helper is not function and asserts(beside, helper):
                return True
    return False
