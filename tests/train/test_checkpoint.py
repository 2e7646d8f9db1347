"""Training checkpoints: whole or absent, exact, and loud when damaged. Metrics: each record once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dflash.errors import CheckpointError
from dflash.train.checkpoint import Position, load_checkpoint, save_checkpoint
from dflash.train.metrics import METRICS_FILE, MetricsWriter


def position(step: int) -> Position:
    return Position(step=step, visit=4 * step, seconds=0.5 * step, recipe="r")


def network(seed: int = 0, width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
    return module, torch.optim.AdamW(module.parameters(), lr=0.01, betas=(0.9, 0.95))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        loss = module(x).pow(2).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def saved(folder: Path, *steps: int) -> Path:
    module, optimizer = network()
    train(module, optimizer, 0, 2)
    for step in steps:
        save_checkpoint(folder, module, optimizer, position(step))
    return folder


def test_training_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """Guards against moments or step counts that are lost: AdamW would start its bias correction anew."""
    whole, optimizer = network()
    expected = train(whole, optimizer, 0, 8)
    first, first_optimizer = network()
    train(first, first_optimizer, 0, 5)
    save_checkpoint(tmp_path, first, first_optimizer, position(5))
    second, second_optimizer = network(seed=9)
    assert load_checkpoint(tmp_path, second, second_optimizer) == position(5)
    assert train(second, second_optimizer, 5, 8) == expected[5:]


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    """Guards against a full disk, and against keeping only one (a damaged one would be the end)."""
    saved(tmp_path, 1, 2, 10, 9, 100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]
    assert load_checkpoint(tmp_path, *network()) == position(100)


def test_no_checkpoint(tmp_path: Path) -> None:
    """Guards against an error at the first start."""
    assert load_checkpoint(tmp_path / "none", *network()) is None


def test_remains_of_a_killed_process(tmp_path: Path) -> None:
    """Guards against half a checkpoint being resumed, and against its files staying for ever."""
    saved(tmp_path, 5)
    partial = tmp_path / ".step-00000006.123"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    unfinished = tmp_path / "step-00000007"
    unfinished.mkdir()
    assert load_checkpoint(tmp_path, *network()) == position(5)
    saved(tmp_path, 6)
    assert not partial.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_damage_is_named_and_the_one_before_can_be_used(tmp_path: Path, name: str, damage: str) -> None:
    """Guards against a traceback, and against going on silently from an older state."""
    saved(tmp_path, 5, 6)
    path = tmp_path / "step-00000006" / name
    path.write_bytes(path.read_bytes()[:-9] if damage == "cut" else b"")
    with pytest.raises(CheckpointError, match=r"step-00000006 cannot be resumed.*delete that folder"):
        load_checkpoint(tmp_path, *network())
    for file in path.parent.iterdir():
        file.unlink()
    path.parent.rmdir()
    assert load_checkpoint(tmp_path, *network()) == position(5)


def test_of_another_network(tmp_path: Path) -> None:
    """Guards against weights of another shape, or moments that do not belong to them."""
    with pytest.raises(CheckpointError, match="cannot be resumed"):
        load_checkpoint(saved(tmp_path, 5), *network(width=6))


def test_missing_moments(tmp_path: Path) -> None:
    """Guards against a parameter whose optimizer state starts from zero without a word."""
    path = saved(tmp_path, 5) / "step-00000005" / "optimizer.safetensors"
    tensors = load_file(path)
    save_file({name: value for name, value in tensors.items() if not name.startswith("2.bias")}, path)
    with pytest.raises(CheckpointError, match=r"no optimizer state of 2\.bias"):
        load_checkpoint(tmp_path, *network())


def test_the_format_is_stable(tmp_path: Path) -> None:
    """Guards against a new version that cannot resume a run of this one: names of files, keys and tensors."""
    folder = saved(tmp_path, 5) / "step-00000005"
    assert sorted(path.name for path in folder.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert set(json.loads((folder / "state.json").read_text())) == {"step", "visit", "seconds", "recipe"}
    assert set(load_file(folder / "model.safetensors")) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    moments = {f"{n}.{p}/{m}" for n in "02" for p in ("weight", "bias") for m in ("step", "exp_avg", "exp_avg_sq")}
    assert set(load_file(folder / "optimizer.safetensors")) == moments


# --- metrics -------------------------------------------------------------------------------------------------------


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_metrics_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    """Guards against duplicates after a resume, and a torn last line making the file unreadable."""
    first = MetricsWriter(tmp_path, resume_step=0)
    for step in (1, 2, 3):
        first.write("train", step, {"loss": step})
    first.close()
    with (tmp_path / METRICS_FILE).open("a") as stream:
        stream.write('{"kind": "train", "st')
    second = MetricsWriter(tmp_path, resume_step=2)
    second.write("train", 3, {"loss": 30})
    second.close()
    assert [(r["step"], r["loss"]) for r in records(tmp_path)] == [(1, 1), (2, 2), (3, 30)]


def test_a_record_at_the_resumed_step_stands(tmp_path: Path) -> None:
    """Guards against an evaluation that is written twice, or done twice."""
    first = MetricsWriter(tmp_path, resume_step=0)
    first.write("decode", 2, {"x": 1})
    first.close()
    second = MetricsWriter(tmp_path, resume_step=2)
    assert second.earlier("decode", 2) == {"x": 1}
    assert second.earlier("decode", 3) is None
    assert second.earlier("held_out", 2) is None
    second.write("decode", 2, {"x": 5})
    second.write("held_out", 2, {"x": 6})
    second.write("decode", 3, {"x": 7})
    second.close()
    assert [(r["kind"], r["x"]) for r in records(tmp_path)] == [("decode", 1), ("held_out", 6), ("decode", 7)]


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    """Guards against records of a run that was killed before its first checkpoint."""
    first = MetricsWriter(tmp_path, resume_step=0)
    first.write("train", 1, {"loss": 1})
    first.close()
    MetricsWriter(tmp_path, resume_step=0).close()
    assert records(tmp_path) == []
