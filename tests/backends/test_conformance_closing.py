"""The suite that every backend passes, on: what is refused or interrupted leaves nothing open, at once and not whenever
the garbage collector comes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash import SamplingParams
from dflash.core.engine import Engine
from dflash.errors import ConfigError, PromptError
from dflash.types import Drafting
from tests.backends.pairs import GREEDY, OpenEngine
from tests.backends.tiny_pair import CONTEXT, save_target


@contextmanager
def watched(kind: type, patch: pytest.MonkeyPatch) -> Iterator[dict[int, Any]]:
    """Objects of a class that are made inside the block and not closed."""
    still_open: dict[int, Any] = {}
    make, close = kind.__init__, kind.close  # type: ignore[misc,attr-defined]

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        still_open[id(self)] = self  # and kept, so that no other gets its place

    def closed(self: Any) -> None:
        close(self)
        still_open.pop(id(self), None)

    with patch.context() as inside:
        inside.setattr(kind, "__init__", made)
        inside.setattr(kind, "close", closed)
        yield still_open


@pytest.fixture(scope="module")
def engine(open_engine: OpenEngine, target_folder: Path, draft_folder: Path) -> Engine:
    return open_engine(target_folder, draft_folder)


@pytest.fixture(scope="module")
def folders(target_folder: Path, draft_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target and what drafts for it."""
    model = save_target(tmp_path_factory.mktemp("model"), seed=2, num_hidden_layers=1)
    return {"target": target_folder, "block": draft_folder, "language model": model}


def session_class(engine: Engine) -> type:
    session = engine.target.session()
    session.close()
    return type(session)


REFUSED: dict[str, Callable[[Engine], object]] = {
    "acceptor": lambda engine: engine.stream("a", SamplingParams(logit_bias={10**6: 1.0})),
    "sampling": lambda engine: engine.stream("a", SamplingParams(logit_bias={1: float("nan")})),
    "draft window": lambda engine: engine.stream("a", drafting=Drafting(draft_window=0)),
    "width": lambda engine: engine.stream("a", drafting=Drafting(width=0)),
    "no prompt": lambda engine: engine.stream("", raw=True),
    "long prompt": lambda engine: engine.generate(prompt_ids=[1] * CONTEXT),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_request_leaves_no_session(engine: Engine, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the session was made, then something about the request is refused, and nobody holds it any more."""
    with watched(session_class(engine), monkeypatch) as still_open:
        with pytest.raises((ConfigError, PromptError)):
            REFUSED[case](engine)
        assert not still_open


def test_a_request_that_ends_early_leaves_no_session(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: only a generation that reaches its end frees its state."""
    with watched(session_class(engine), monkeypatch) as still_open:
        events = engine.stream("a", GREEDY)
        next(events)
        assert len(still_open) == 1
        events.close()
        assert not still_open
        engine.generate("a", GREEDY)
        assert not still_open


@pytest.mark.parametrize("step", ["probe", "load_costs", "load_attribute"])
@pytest.mark.parametrize("drafts", ["block", "language model"])
def test_a_load_that_stops_leaves_no_model_open(
    open_engine: OpenEngine,
    engine: Engine,
    folders: dict[str, Path],
    step: str,
    drafts: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: hooks and watched layers stay on models whose later steps are refused or interrupted; a draft's own model
    is forgotten first."""
    module = sys.modules[type(engine).__module__]
    with watched(type(engine.target), monkeypatch) as still_open:
        stopped = []

        def stop(*args: Any, **kwargs: Any) -> Any:
            if step == "load_attribute":  # the step that it leads to: making a drafter for this target
                return stop_making
            return stop_making(*args, **kwargs)

        def stop_making(*args: Any, **kwargs: Any) -> Any:
            stopped.append(step)
            raise KeyboardInterrupt

        monkeypatch.setattr(module, step, stop)
        with pytest.raises(KeyboardInterrupt):
            open_engine(folders["target"], folders[drafts])
        assert stopped
        assert not still_open


def test_a_closed_engine_leaves_no_model_open(
    open_engine: OpenEngine, engine: Engine, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: only the target is closed."""
    with watched(type(engine.target), monkeypatch) as still_open:
        pair = open_engine(folders["target"], folders["language model"], exact=False, drafting=Drafting(fixed=True))
        assert len(still_open) == 2
        pair.close()
        assert not still_open
