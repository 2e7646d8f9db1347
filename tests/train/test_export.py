"""What a run leaves behind to decode with, whenever it ends: a whole draft, and nothing false beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash.backends.torch.draft_loading import load_draft
from dflash.core.bigrams import read_bigrams
from dflash.train.trainer import run_training
from tests.train.toy import metrics, recipe, run

CPU = torch.device("cpu")


def provenance(out: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((out / "draft/provenance.json").read_text())
    return facts


def exported_step(out: Path, steps: Sequence[int]) -> list[int]:
    """Those of `steps` whose checkpoint the exported weights equal, in bfloat16."""
    exported = load_file(out / "draft/model.safetensors")
    checkpoints = {step: load_file(out / f"checkpoints/step-{step:08d}/model.safetensors") for step in steps}
    return [
        step
        for step, masters in checkpoints.items()
        if all(torch.equal(exported[name], value.bfloat16()) for name, value in masters.items())
    ]


@pytest.mark.parametrize("evaluate_prompts", [2, 0])
def test_a_killed_run_leaves_the_draft_of_its_last_evaluation(
    pair: Path, tmp_path: Path, evaluate_prompts: int
) -> None:
    """Guards against days of training that leave nothing to decode with, and against a provenance of another step: a
    run that stops two steps behind its first evaluation, then one that goes on to the end."""
    out = tmp_path / "run"
    path = recipe(pair, out, log_every=1, checkpoint_every=2, evaluate_prompts=evaluate_prompts)

    def stop(what: str, share: float | None) -> None:
        if what.startswith("step 6/8"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(path, progress=stop)
    assert load_draft(out / "draft", CPU, torch.bfloat16).config.block_size == 5
    facts = provenance(out)
    assert (facts["steps"], facts["sequences_seen"]) == (4, 8)
    assert exported_step(out, [2, 4]) == [4]
    if evaluate_prompts:
        (decoded,) = metrics(out, "decode")
        assert facts["held_out"] == {key: value for key, value in decoded.items() if key not in ("kind", "step")}
    run_training(path, resume=True)
    assert read_bigrams(out / "draft", 1 << 31) is not None
    facts = provenance(out)
    assert (facts["steps"], facts["sequences_seen"]) == (8, 16)
    assert exported_step(out, [6, 8]) == [8]
    assert (facts["held_out"] is not None) == bool(evaluate_prompts)


@pytest.mark.parametrize("at", ["save_file", "write_recipe", "write_json_atomically"])
def test_an_export_that_is_cut_short_has_no_wrong_provenance(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Guards against new weights beside the figures of old ones: killed at each stage of the second export, the draft
    stays usable and says nothing rather than something false; --resume makes up for it."""
    out = tmp_path / "run"
    run(pair, out, steps=3, max_minutes=1e-9)
    assert provenance(out)["steps"] == 1

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"dflash.train.export.{at}", killed)
        with pytest.raises(KeyboardInterrupt):
            run(pair, out, resume=True, steps=3, max_minutes=1e-9)
    load_draft(out / "draft", CPU, torch.bfloat16)
    assert not (out / "draft/provenance.json").exists()
    run(pair, out, resume=True, steps=3)
    assert provenance(out)["steps"] == 3
