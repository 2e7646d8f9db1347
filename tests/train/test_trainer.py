"""Whole runs on a tiny target: they learn, they can be killed at any moment, and what they export is a draft."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from dflash.backends.torch.draft_loading import load_draft
from dflash.backends.torch.drafters.dflash import DFlashDrafter
from dflash.backends.torch.sampling import TorchAcceptor
from dflash.backends.torch.target import TorchTarget
from dflash.core.draft_reader import read_draft_config
from dflash.core.loop import speculative_rounds
from dflash.core.stopping import StopRule
from dflash.errors import CheckpointError, ConfigError
from dflash.train.anchors import Blocks
from dflash.train.config import OptimizerConfig, load_config
from dflash.train.evaluate import decode_report
from dflash.train.setup import open_run
from dflash.train.step import collate, training_sums
from dflash.train.trainer import Trainer, learning_rate, run_training
from dflash.types import SamplingParams
from tests.backends.tiny_pair import HIDDEN
from tests.train.toy import metrics, recipe, run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 100 steps."""
    out = tmp_path_factory.mktemp("trained") / "run"
    run(pair, out, steps=100, evaluate_prompts=8, evaluate_tokens=32, evaluate_every=100, checkpoint_every=50)
    return out


@pytest.fixture(scope="module")
def whole(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run that nobody interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(pair, out, log_every=1)
    return out


def test_training_beats_the_untrained_draft(pair: Path, trained: Path) -> None:
    """Guards against a trainer whose loss falls while decoding gains nothing: acceptance length by the real
    loop, before and after. Chance gives 1.00 here (260 tokens)."""
    fresh = open_run(load_config(recipe(pair, trained.parent / "fresh")))
    target = TorchTarget(fresh.target.model, taps=(0, 2))
    prompts = [s.token_ids[:8].tolist() for s in fresh.data.held_out]
    before = decode_report(fresh.network.eval(), target, prompts, eos_ids=frozenset(), max_new_tokens=32)
    exported = load_draft(trained / "draft", CPU, torch.float32)
    after = decode_report(exported, target, prompts, eos_ids=frozenset(), max_new_tokens=32)
    assert before.acceptance_length < 1.1
    assert after.acceptance_length > 1.4
    losses = [record["loss"] for record in metrics(trained, "train")]
    assert losses[-1] < 0.5 * losses[0]


def test_decoding_accepts_what_teacher_forcing_says(pair: Path, trained: Path) -> None:
    """Guards against two figures that drift apart: at the anchors where the decode loop stood, the training step
    must find exactly the prefixes that the loop accepted."""
    fresh = open_run(load_config(recipe(pair, trained.parent / "same")))
    network = load_draft(trained / "draft", CPU, torch.float32)
    target = TorchTarget(fresh.target.model, taps=(0, 2))
    params = SamplingParams(max_new_tokens=40)
    lengths, expected = [], []
    for sequence in fresh.data.held_out:
        prompt = sequence.token_ids[:8].tolist()
        acceptor = TorchAcceptor(params, prompt, target.vocab_size, target.device)
        drafter = DFlashDrafter(network, target).session()
        rounds = list(
            speculative_rounds(target.session(exact=False), drafter, acceptor, StopRule(()), prompt, max_new_tokens=40)
        )
        tokens = [token for step in rounds for token in step.tokens]
        ids = np.array(prompt + tokens)
        rows = fresh.features.features(ids.tolist())
        at = len(prompt)
        for step in rounds[1:-1]:  # the last one may be cut by the limit
            if len(ids) < at + 5:
                break
            slots = ids[None, at + 1 : at + 5]
            batch = collate([rows], [ids], [Blocks(np.array([at]), slots, np.ones_like(slots, dtype=np.bool_))])
            sums = training_sums(network, fresh.head, batch, gamma=4.0, distill=0.0, teacher_NSH=None)
            expected.append(int(sums.accepted))
            lengths.append(len(step.tokens))
            at += len(step.tokens)
    assert lengths == expected
    assert len(lengths) > 50
    assert max(lengths) == 5


# --- interruption --------------------------------------------------------------------------------------------------


def test_records_without_holes_or_duplicates(whole: Path) -> None:
    """Guards against steps that no record covers: logs every step, evaluations where the recipe says so."""
    assert [r["step"] for r in metrics(whole, "train")] == list(range(1, 9))
    assert [r["visit"] for r in metrics(whole, "train")] == list(range(2, 18, 2))
    for kind in ("held_out", "decode"):
        assert [r["step"] for r in metrics(whole, kind)] == [4, 8]
    assert all(math.isfinite(r["loss"]) for r in metrics(whole, "train") + metrics(whole, "held_out"))


def test_log_windows_end_at_checkpoints(pair: Path, tmp_path: Path) -> None:
    """Guards against a resumed run whose next record leaves out the steps before its checkpoint."""
    run(pair, tmp_path / "run", log_every=3, checkpoint_every=4)
    assert [r["step"] for r in metrics(tmp_path / "run", "train")] == [3, 4, 6, 8]


KILLED = """
import gc, sys, time
gc.disable()  # a fifth of the imports below
from pathlib import Path
from dflash.train.trainer import run_training

def show(what, share):  # slow behind the place where it is to be killed, so that whoever does it is never too late
    if what.startswith("step ") and share > 0.5:
        time.sleep(1)

run_training(Path(sys.argv[1]), progress=show)
"""


def test_kill_and_resume(pair: Path, tmp_path: Path) -> None:
    """Guards against anything that a killed process takes with it: kill -9 somewhere behind the second checkpoint, then
    the same losses, evaluations and weights as a run that was never stopped, each record once."""
    changes: dict[str, Any] = {"steps": 20, "log_every": 1, "checkpoint_every": 3, "evaluate_every": 10}
    path, out = recipe(pair, tmp_path / "killed", **changes), tmp_path / "killed"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300  # starting takes long beside other jobs
    while time.monotonic() < deadline and process.poll() is None:
        if (out / "metrics.jsonl").is_file() and len(metrics_lines(out)) >= 8:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    _, complaint = process.communicate()
    assert process.returncode == -signal.SIGKILL, complaint.decode()
    done = len(metrics_lines(out))
    assert 8 <= done < 20, "killed in the middle"
    run_training(path, resume=True)
    run(pair, tmp_path / "straight", **changes)
    for kind in ("train", "held_out", "decode"):
        assert metrics(out, kind) == metrics(tmp_path / "straight", kind)
    for name in ("draft/model.safetensors", "checkpoints/step-00000020/optimizer.safetensors"):
        assert (out / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def metrics_lines(out: Path) -> list[str]:
    """Complete lines so far."""
    return (out / "metrics.jsonl").read_text().split("\n")[:-1]


def test_stopping_after_every_step(pair: Path, whole: Path, tmp_path: Path) -> None:
    """Guards against a time limit that loses work: eight processes of one step each equal one of eight."""
    for _ in range(8):
        run(pair, tmp_path / "run", resume=True, log_every=1, max_minutes=1e-9, evaluate_prompts=0)
    assert metrics(tmp_path / "run", "train") == metrics(whole, "train")
    assert (tmp_path / "run/draft/model.safetensors").read_bytes() == (whole / "draft/model.safetensors").read_bytes()


def test_an_evaluation_that_was_killed_is_made_up_for(pair: Path, whole: Path, tmp_path: Path) -> None:
    """Guards against a hole: the checkpoint of a step was written, the evaluation behind it was not."""
    out = tmp_path / "run"
    run(pair, out, log_every=1)
    lines = metrics_lines(out)
    assert json.loads(lines[-1])["kind"] == "decode"
    (out / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    summary = run(pair, out, resume=True, log_every=1)
    assert metrics(out, "decode") == metrics(whole, "decode")
    assert metrics(out, "held_out") == metrics(whole, "held_out")
    assert summary.acceptance_length == metrics(whole, "decode")[-1]["acceptance_length"]


def test_a_finished_run_stays_as_it_is(pair: Path, tmp_path: Path) -> None:
    """Guards against a second --resume that adds records or forgets the acceptance in the exported draft."""
    out = tmp_path / "run"
    first = run(pair, out)
    before = metrics_lines(out)
    again = run(pair, out, resume=True)
    assert again == first
    assert metrics_lines(out) == before
    assert json.loads((out / "draft/provenance.json").read_text())["held_out"] is not None


# --- refusals ------------------------------------------------------------------------------------------------------


def test_a_folder_with_a_run_needs_resume(pair: Path, whole: Path) -> None:
    """Guards against overwriting a finished run by a repeated command."""
    with pytest.raises(ConfigError, match="--resume"):
        run(pair, whole)


def test_two_processes_in_one_folder(pair: Path, tmp_path: Path) -> None:
    """Guards against two trainings that overwrite one another's checkpoints."""
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(ConfigError, match="another process is training"):
        run(pair, tmp_path / "run")


def test_another_recipe_or_other_data(pair: Path, tmp_path: Path) -> None:
    """Guards against going on with another schedule, or on a split that has held-out sequences in the training part."""
    out = tmp_path / "run"
    run(pair, out, steps=2, evaluate_prompts=0)
    with pytest.raises(CheckpointError, match="another recipe"):
        run(pair, out, resume=True, steps=3)
    answers = pair / "answers.jsonl"
    rows = answers.read_text()
    answers.write_text("".join(rows.splitlines(keepends=True)[:-1]))
    try:
        with pytest.raises(ConfigError, match=r"was started on 40 sequences.*now gives 39"):
            run(pair, out, resume=True, steps=2, evaluate_prompts=0)
    finally:
        answers.write_text(rows)
    run(pair, out, resume=True, steps=2, evaluate_prompts=0)


def test_a_corrupt_checkpoint_is_named(pair: Path, tmp_path: Path) -> None:
    """Guards against a traceback, and shows that the cure in the message works."""
    out = tmp_path / "run"
    run(pair, out, evaluate_prompts=0, log_every=1)
    newest = out / "checkpoints" / "step-00000008"
    (newest / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="step-00000008"):
        run(pair, out, resume=True, evaluate_prompts=0, log_every=1)
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    assert run(pair, out, resume=True, evaluate_prompts=0, log_every=1).steps == 8
    assert [r["step"] for r in metrics(out, "train")] == list(range(1, 9))


def test_divergence_stops_before_the_checkpoint(pair: Path, tmp_path: Path) -> None:
    """Guards against hours on NaN, and against a checkpoint of it replacing the last good one."""
    optimizer = {"learning_rate": 1e30, "warmup_steps": 0}
    with pytest.raises(ConfigError, match=r"diverged at step \d.*learning_rate"):
        run(pair, tmp_path / "run", optimizer=optimizer, checkpoint_every=100, evaluate_prompts=0)
    assert not (tmp_path / "run" / "checkpoints").exists()


# --- variants ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"micro_batch": 2}},
        {"data": {"features": "cached"}},
        {"network": {"start": "random"}},
        {"network": {"start": "routed"}},
        {"loss": {"distill": 0.5}},
        {"network": {"draft_vocabulary_size": 100}, "loss": {"distill": 1.0}},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "loss": {"distill": 0.5}, "optimizer": {"micro_batch": 2}},
        {"optimizer": {"schedule": "constant"}, "evaluate_prompts": 0},
    ],
    ids=lambda changes: json.dumps(changes),
)
def test_variants_learn(pair: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Guards against options that crash, produce NaN or an unusable draft; weights stay float32 in every one."""
    out = tmp_path / "run"
    run(pair, out, steps=8, checkpoint_every=8, evaluate_every=8, **changes)
    losses = [r["loss"] for r in metrics(out, "train")]
    assert losses[-1] < losses[0]
    network = load_draft(out / "draft", CPU, torch.float32)
    assert (network.vocabulary is not None) == ("draft_vocabulary_size" in changes.get("network", {}))
    masters = load_file(out / "checkpoints/step-00000008/model.safetensors")
    assert {value.dtype for value in masters.values()} == {torch.float32}


def test_micro_batches_change_nothing(pair: Path, whole: Path, tmp_path: Path) -> None:
    """Guards against a mean of means: two sequences per forward equal one by one."""
    run(pair, tmp_path / "run", log_every=1, optimizer={"micro_batch": 2})
    pairs = zip(metrics(tmp_path / "run", "train"), metrics(whole, "train"), strict=True)
    for ours, theirs in pairs:
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert ours["visit"] == theirs["visit"]


def test_cached_features_give_nearly_the_same_run(pair: Path, whole: Path, tmp_path: Path) -> None:
    """Guards against a store that serves another sequence's rows: only the rounding to bfloat16 may differ."""
    run(pair, tmp_path / "run", log_every=1, data={"features": "cached"})
    for ours, theirs in zip(metrics(tmp_path / "run", "train"), metrics(whole, "train"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)
    assert (tmp_path / "run" / "features" / "manifest.json").is_file()


@pytest.mark.parametrize("features", ["online", "cached"])
def test_distillation_needs_no_tap_of_the_last_layer(pair: Path, tmp_path: Path, features: str) -> None:
    """Guards against a teacher that is another layer's state, or against states of the last layer that leak into the
    draft's features, when the draft does not tap it."""
    loss = {"distill": 1.0}
    data = {"features": features}
    open_ = [
        Trainer(config, open_run(config))
        for name, taps in (("with", [0, 2]), ("without", [0, 1]))
        for config in [
            load_config(recipe(pair, tmp_path / name, loss=loss, data=data, network={"target_layer_ids": taps}))
        ]
    ]
    seen: list[torch.Tensor] = []
    for trainer in open_:
        with pytest.MonkeyPatch.context() as patch:

            def record(network: Any, head: Any, batch: Any, *, teacher_NSH: torch.Tensor, **options: Any) -> Any:
                assert batch.features_NSF.shape[-1] == 2 * HIDDEN == network.fc.in_features
                seen.append(teacher_NSH)
                return training_sums(network, head, batch, teacher_NSH=teacher_NSH, **options)

            patch.setattr("dflash.train.trainer.training_sums", record)
            with trainer.drawer() as drawer:
                trainer.sums(drawer.draw([(0, np.random.default_rng(0)), (1, np.random.default_rng(1))]))
        trainer.target.close()
    assert torch.equal(seen[0], seen[1])
    run(pair, tmp_path / "whole", loss=loss, data=data, network={"target_layer_ids": [0, 1]})
    assert read_draft_config(tmp_path / "whole" / "draft").target_layer_ids == (0, 1)


def test_the_export_can_be_used_and_repeated(whole: Path) -> None:
    """Guards against weights whose origin nobody knows, and against folders of this machine in what is published."""
    folder = whole / "draft"
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "draft_bigrams.json",
        "model.safetensors",
        "recipe.yaml",
        "provenance.json",
    }
    network = load_draft(folder, CPU, torch.bfloat16)
    assert network.config.block_size == 5
    assert network.config.target_layer_ids == (0, 2)
    facts = json.loads((folder / "provenance.json").read_text())
    assert facts["steps"] == 8
    assert facts["sequences_seen"] == 16
    assert facts["data"]["sequences"] == 40
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["held_out"]["acceptance_length"] >= 1
    for path in (folder / "provenance.json", folder / "recipe.yaml"):
        assert str(whole.parent.parent) not in path.read_text()
    assert load_config(whole / "recipe.yaml").steps == 8


def test_init_goes_on_from_a_draft(pair: Path, trained: Path, tmp_path: Path) -> None:
    """Guards against --init that starts anew, or loses the draft's vocabulary: it begins with the draft's own loss."""
    small, out = tmp_path / "small", tmp_path / "more"
    run(pair, small, steps=60, evaluate_every=60, evaluate_prompts=0, network={"draft_vocabulary_size": 60})
    shape = {"target_layer_ids": None, "mask_token_id": None, "num_layers": 3, "block_size": 8}  # the defaults
    changes: dict[str, Any] = {"network": shape, "init": str(small / "draft"), "evaluate_every": 1, "steps": 1}
    run(pair, out, optimizer={"learning_rate": 1e-6, "min_learning_rate": 0}, **changes)
    end, start = (metrics(folder, "held_out")[-1] for folder in (small, out))
    assert start["loss"] == pytest.approx(end["loss"], rel=0.01)
    assert end["expected_acceptance_length"] > 1.3
    before, after = (load_draft(folder / "draft", CPU, torch.float32) for folder in (small, out))
    assert after.config == before.config
    assert after.vocabulary == before.vocabulary
    assert len(after.vocabulary or ()) == 60


@pytest.mark.parametrize("changed", [{"block_size": 6}, {"draft_vocabulary_size": 10}, {"target_layer_ids": [1, 2]}])
def test_init_refuses_another_shape(pair: Path, trained: Path, tmp_path: Path, changed: dict[str, Any]) -> None:
    """Guards against keys of `network` that are silently ignored beside `init`."""
    with pytest.raises(ConfigError, match=next(iter(changed))):
        run(pair, tmp_path / "run", init=str(trained / "draft"), network=changed)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("cosine", [0.5, 1.0, 1.0, 0.8536, 0.5, 0.1464]), ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 0.5])],
)
def test_learning_rate(schedule: str, expected: list[float]) -> None:
    """Guards against a warm-up that starts at zero or a decay that never ends: six steps, two of warm-up."""
    config = OptimizerConfig.model_validate(
        {"learning_rate": 1.0, "min_learning_rate": 0.0, "warmup_steps": 2, "schedule": schedule, "decay_share": 0.3}
    )
    rates = [learning_rate(step, 6, config) for step in range(6)]
    assert rates == pytest.approx(expected, abs=1e-3)
    assert list(itertools.pairwise(rates[2:])) == sorted(itertools.pairwise(rates[2:]), reverse=True)
