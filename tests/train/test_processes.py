"""The trainer's one seam for several processes: two of them, as threads, equal one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from dflash.train.config import load_config
from dflash.train.setup import prepare_run
from dflash.train.trainer import Trainer
from tests.train.toy import make_pair, metrics, recipe

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


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Guards against a step that divides before summing, evaluates or writes in every process, or looks at its own
    sequences only: same losses, records once, same weights up to rounding."""
    pair = make_pair(tmp_path)
    changes = {"log_every": 1, "optimizer": {"sequences_per_step": 3}}  # uneven shares
    alone = Trainer(config := load_config(recipe(pair, tmp_path / "one", **changes)), prepare_run(config))
    alone.train()
    config = load_config(recipe(pair, tmp_path / "two", **changes))
    table: dict[int, list[Tensor]] = {}
    barrier = threading.Barrier(NUM)
    trainers = [Trainer(config, prepare_run(config), Thread(rank, table, barrier)) for rank in range(NUM)]
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
