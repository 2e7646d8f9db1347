"""The suite that every backend passes, second part: what loading says, and what is refused with the cure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dflash.core.engine import Engine
from dflash.core.pair_checks import end_ids
from dflash.errors import ConfigError, ModelError, PairError, PromptError, UnsupportedModel
from tests.backends import tiny_pair
from tests.backends.pairs import BACKENDS, GREEDY, OpenEngine
from tests.backends.tiny_pair import save_target


@pytest.fixture(scope="module")
def engine(open_engine: OpenEngine, target_folder: Path, draft_folder: Path) -> Engine:
    return open_engine(target_folder, draft_folder)


def test_not_exact_on_request(open_engine: OpenEngine, target_folder: Path, draft_folder: Path) -> None:
    """exact=False skips the probe and cannot be asked for exactness later: every option has an effect or raises."""
    pair = open_engine(target_folder, draft_folder, exact=False)
    assert pair.info.exactness is None
    assert not pair.info.exact
    assert len(pair.generate("hi", GREEDY).token_ids) == GREEDY.max_new_tokens
    with pytest.raises(ConfigError, match="exact=True"):
        pair.stream("hi", exact=True)
    pair.close()


def test_steps_are_reported(
    open_engine: OpenEngine, target_folder: Path, draft_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Loading tells the callback what it does and draws nothing itself."""
    seen: list[str] = []
    open_engine(target_folder, draft_folder, progress=lambda what, share: seen.append(what)).close()
    steps = list(dict.fromkeys(seen))
    named = [re.sub(r" /.*", "", step) for step in steps]
    # What can be refused comes first; what only takes time, later.
    assert [step for step in named if step.split()[0] in ("loading", "checking")] == [
        "loading",
        "loading draft",
        "checking bit-exactness",
    ]
    assert named[-1] in ("checking bit-exactness", "measuring costs")
    assert capfd.readouterr().err == ""


def test_what_cannot_be_loaded_is_refused(
    open_engine: OpenEngine, target_folder: Path, draft_folder: Path, tmp_path: Path
) -> None:
    """The message names the cure, whichever library fell over the files."""
    with pytest.raises(ConfigError, match="float32"):
        open_engine(target_folder, None, dtype="float31")
    with pytest.raises(ConfigError, match="width 99"):
        open_engine(target_folder, draft_folder, width=99)
    with pytest.raises(PairError, match="hidden size 32"):
        open_engine(save_target(tmp_path / "wide", hidden_size=48), draft_folder)
    torn = save_target(tmp_path / "torn")
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="is damaged"):
        open_engine(torn, None)
    unknown = save_target(tmp_path / "unknown")
    config = unknown / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"no_such_family"'))
    with pytest.raises(UnsupportedModel, match="no_such_family"):
        open_engine(unknown, None)


def test_prompt_errors_come_at_once(engine: Engine) -> None:
    """Before the first round is asked for, so that a server can answer with an error instead of a broken stream."""
    bad: tuple[dict[str, Any], ...] = (
        {},
        {"prompt": "a", "prompt_ids": [1]},
        {"prompt_ids": []},
        {"prompt": "", "raw": True},
        {"prompt_ids": [-1]},
        {"prompt_ids": [tiny_pair.VOCAB]},
        {"prompt": []},
        {"prompt": [{"role": "user"}]},
        {"prompt": [{"role": "user", "content": "x"}], "raw": True},
        {"prompt": [{"role": "wizard", "content": "x"}]},
    )
    for arguments in bad:
        with pytest.raises(PromptError):
            engine.stream(**arguments)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"eos_token_id": "x"}', '{"eos_token_id": [1.5]}', '{"eos_token_id": -1}']
)
def test_a_damaged_generation_config(open_engine: OpenEngine, tmp_path: Path, text: str) -> None:
    """Fault: a traceback, or ends of answers that no token is, so that every answer runs to its limit."""
    folder = save_target(tmp_path / "target")
    (folder / "generation_config.json").write_text(text)
    if text == "{" and open_engine is BACKENDS["torch"]:
        pytest.skip("Transformers reads config.json in its place")
    with pytest.raises(ModelError, match=r"generation.config|cannot be read"):
        open_engine(folder, None, exact=False)


def test_end_ids() -> None:
    """The first place that names any counts; an id and a list of ids are the same."""
    assert end_ids((None, 3, [5]), "t") == {3}
    assert end_ids((None, [5, 6], 3), "t") == {5, 6}
    assert end_ids((None, None), "t") == frozenset()
