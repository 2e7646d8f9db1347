"""What a run takes over from another one: a draft, cached features, its own folder; nothing leaks with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dflash.errors import CheckpointError, ConfigError
from dflash.train.data import SPLIT
from tests.train.toy import run


def test_a_run_with_another_rule_of_splitting(pair: Path, tmp_path: Path) -> None:
    """Guards against a resumed run of an earlier version, which held out other prompts, and against a message that says
    the answers have changed."""
    out = tmp_path / "run"
    run(pair, out, steps=2, evaluate_prompts=0)
    stated = json.loads((out / "data.json").read_text())
    assert stated.pop("split") == SPLIT
    (out / "data.json").write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match=r"held out other prompts.*init"):
        run(pair, out, resume=True, steps=2, evaluate_prompts=0)


def test_init_from_another_split_is_said(pair: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against flattering held-out figures of a second stage, because the first one learnt these prompts."""
    options: dict[str, Any] = {"steps": 1, "evaluate_prompts": 0}
    run(pair, tmp_path / "first", **options)
    init = str(tmp_path / "first" / "draft")
    run(pair, tmp_path / "same", init=init, **options)
    assert "split" not in caplog.text
    run(pair, tmp_path / "other", init=init, **options, data={"split_seed": 1})
    assert "data.split_seed 1): it may have learnt prompts that this run holds out" in caplog.text


def test_cached_features_of_another_target_of_the_same_name(pair: Path, tmp_path: Path) -> None:
    """Guards against features of weights that were since replaced in their folder: name and shape are right."""
    target = shutil.copytree(pair / "target", tmp_path / "target")
    options: dict[str, Any] = {"target": str(target), "steps": 1, "evaluate_prompts": 0}
    data = {"features": "cached", "features_folder": str(tmp_path / "features")}
    run(pair, tmp_path / "one", **options, data=data)
    run(pair, tmp_path / "two", **options, data=data)
    weights = load_file(target / "model.safetensors")
    name = next(name for name in weights if "down_proj" in name)
    save_file(weights | {name: weights[name] * 1.01}, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"by their weights; give another data\.features_folder"):
        run(pair, tmp_path / "three", **options, data=data)
