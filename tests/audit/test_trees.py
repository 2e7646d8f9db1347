"""The tree test passes what is right, and catches each of the faults that no chain shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from dflash.audit.oracle import open_oracle
from dflash.audit.recorder import LayerRecorder
from dflash.audit.trees import PARENTS, PATHS, TreeAudit, audit_trees
from dflash.backends.torch import masks
from dflash.backends.torch.states.full import FullKeyValueState
from tests.audit.subjects import plain_engine_of
from tests.backends.architectures import WINDOW, model_of

Break = Callable[[pytest.MonkeyPatch], None]


def branches_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree is masked like a chain."""
    monkeypatch.setattr(masks, "tree_mask", lambda mask, start, parents: mask)


def positions_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's position counts its siblings; with them its rotary angle and its window."""

    def broken(start: int, num_rows: int, proposal: object) -> Sequence[int]:
        return range(start, start + num_rows)

    monkeypatch.setattr(masks, "row_positions", broken)
    monkeypatch.setattr("dflash.backends.torch.target.row_positions", broken)


def kept_rows_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is kept as if it were the first rows."""
    monkeypatch.setattr(FullKeyValueState, "commit", lambda self, path: None)


def audited(family: str) -> TreeAudit:
    engine = plain_engine_of(model_of(family))
    recorder = LayerRecorder(engine, exact=True)
    try:
        return audit_trees(recorder, open_oracle(engine), prompt_length=2 * WINDOW + 3)
    finally:
        recorder.close()
        engine.close()


@pytest.mark.parametrize("fault", [branches_see_each_other, positions_by_row, kept_rows_stay_where_they_are])
def test_a_fault_in_trees_is_caught(fault: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an audit of trees that passes whatever they are."""
    fault(monkeypatch)
    found = audited("Llama")
    assert not found.passed
    assert found.path in PATHS


@pytest.mark.parametrize("family", ["Llama", "Gemma 3", "GLM-MoE-DSA"])
def test_trees_that_are_right_pass(family: str) -> None:
    """Guards against false alarms: full keys and values, windows, an indexer."""
    found = audited(family)
    assert found.passed, (found.error, found.tolerance)
    assert found.path is None
    assert found.num_rows == sum(len(path) + 3 for path in PATHS)


def test_the_paths_are_those_of_the_tree() -> None:
    """Guards against a path that is none, and against a leaf that nobody looks at."""
    parents = (None, *PARENTS)
    for path in PATHS:
        assert [parents[row] for row in path[1:]] == list(path[:-1])
    assert {path[-1] for path in PATHS} == set(range(9)) - set(PARENTS)
