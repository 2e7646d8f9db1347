"""The trainer's one seam for several processes: two of them, as threads, equal one."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from dflash.resolve import Progress
from dflash.train.config import TrainConfig, load_config
from dflash.train.processes import SingleProcess
from dflash.train.setup import Run, open_run
from dflash.train.trainer import Trainer, TrainSummary, run_training
from tests.train.toy import metrics, recipe

T = TypeVar("T")
NUM = 2


class Thread:
    """One of two ranks; sums go over a table that both can see."""

    def __init__(self, rank: int, table: dict[int, list[Tensor]], barrier: threading.Barrier) -> None:
        self.rank, self._table, self._barrier = rank, table, barrier

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        return items[self.rank :: NUM]

    def total(self, values: Sequence[Tensor]) -> None:
        self._table[self.rank] = [value.clone() for value in values]
        self._barrier.wait(60)
        for index, value in enumerate(values):
            value.copy_(torch.stack([self._table[rank][index] for rank in range(NUM)]).sum(0))
        self._barrier.wait(60)


def test_two_processes_equal_one(pair: Path, tmp_path: Path) -> None:
    """Guards against a step that divides before summing, evaluates or writes in every process, or looks at its own
    sequences only: same losses, records once, same weights up to rounding."""
    changes = {"log_every": 1, "optimizer": {"sequences_per_step": 3}}  # uneven shares
    alone = Trainer(config := load_config(recipe(pair, tmp_path / "one", **changes)), open_run(config))
    alone.train()
    config = load_config(recipe(pair, tmp_path / "two", **changes))
    table: dict[int, list[Tensor]] = {}
    barrier = threading.Barrier(NUM)
    trainers = [Trainer(config, open_run(config), Thread(rank, table, barrier)) for rank in range(NUM)]
    threads = [threading.Thread(target=trainer.train) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    ours, theirs = (metrics(tmp_path / name, "train") for name in ("two", "one"))
    assert [r["step"] for r in ours] == [r["step"] for r in theirs] == list(range(1, 9))
    assert len(metrics(tmp_path / "two", "decode")) == 2
    for one, two in zip(theirs, ours, strict=True):
        assert abs(one["loss"] - two["loss"]) < 1e-3 * one["loss"]
    first, second = (dict(trainer.run.network.named_parameters()) for trainer in trainers)
    for name, parameter in alone.run.network.named_parameters():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], parameter, rtol=1e-2, atol=1e-3)


def runs_of_two(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TrainSummary]:
    """`run_training` in both ranks at once, as a launcher starts it. Loading waits its turn: threads are no processes,
    and Transformers' way of loading is process-wide."""
    turn, opened = threading.Lock(), threading.Barrier(NUM)

    def open_in_turn(config: TrainConfig, progress: Progress | None) -> Run:
        with turn:
            run = open_run(config, progress)
        opened.wait(60)
        return run

    monkeypatch.setattr("dflash.train.trainer.open_run", open_in_turn)
    table: dict[int, list[Tensor]] = {}
    barrier = threading.Barrier(NUM)
    with ThreadPoolExecutor(NUM) as pool:
        started = [pool.submit(run_training, path, processes=Thread(rank, table, barrier)) for rank in range(NUM)]
        return [run.result(120) for run in started]


def test_one_rank_holds_the_folder_and_an_empty_share_is_a_share(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against ranks that lock one another out, write the same files, or fail on a log window without a sequence
    of theirs: with one sequence per step the second rank has nothing to do, in any step."""
    changes: dict[str, Any] = {"optimizer": {"sequences_per_step": 1}, "log_every": 2}
    alone = run_training(recipe(pair, tmp_path / "one", **changes))
    main, other = runs_of_two(recipe(pair, tmp_path / "two", **changes), monkeypatch)
    assert main.acceptance_length == alone.acceptance_length
    assert (main.steps, main.draft) == (other.steps, other.draft)
    assert math.isnan(other.acceptance_length)
    for kind in ("train", "held_out", "decode"):
        assert metrics(tmp_path / "two", kind) == metrics(tmp_path / "one", kind)
    weights = [(tmp_path / name / "draft/model.safetensors").read_bytes() for name in ("two", "one")]
    assert weights[0] == weights[1]


def test_time_is_up_for_all_ranks_at_once(pair: Path, tmp_path: Path) -> None:
    """Guards against a rank that stops by its own clock while the others wait for it in the next step."""

    class LateElsewhere(SingleProcess):
        """Another rank, whose clock says that the time is up."""

        def total(self, values: Sequence[Tensor]) -> None:
            if [value.shape for value in values] == [(1,)]:
                values[0].add_(1)

    path = recipe(pair, tmp_path / "run", max_minutes=1000, evaluate_prompts=0)
    assert run_training(path, processes=LateElsewhere()).steps == 1
    assert (tmp_path / "run/draft/provenance.json").is_file()
    assert run_training(recipe(pair, tmp_path / "free", evaluate_prompts=0), processes=LateElsewhere()).steps == 8


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_all_that_is_added_up_lies_on_the_device_of_the_run(pair: Path, tmp_path: Path, device: str) -> None:
    """Guards against CPU tensors beside CUDA gradients: the collectives of GPUs take none."""
    found: list[set[str]] = []

    class Watching(SingleProcess):
        def total(self, values: Sequence[Tensor]) -> None:
            found.append({value.device.type for value in values})

    run_training(recipe(pair, tmp_path / "run", device=device, max_minutes=1000), processes=Watching())
    assert len(found) == 8 + 8 + 4, "gradients, clocks, log windows"
    assert all(devices == {device} for devices in found)
