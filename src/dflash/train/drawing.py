"""What each optimizer step learns from: its sequences and freshly drawn blocks, made ready while the step before runs.

Only numbers and numpy: nothing here waits for a device, so that a GPU is not left idle between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from dflash.train.anchors import Blocks, draw_blocks
from dflash.train.config import TrainConfig
from dflash.train.data import AnswerSequence, Dataset, Grouping, visits
from dflash.train.processes import Processes

Chosen = Sequence[tuple[int, np.random.Generator]]
"""Sequence numbers, each with the generator of its anchors."""


class Drawn(NamedTuple):
    """One micro-batch."""

    sequences: list[AnswerSequence]
    blocks: list[Blocks]


class StepDrawer:
    """This process's micro-batches of one step after the other, from visit `start` on; a context manager.

    What is drawn is a function of the recipe and the visit alone, not of when it is drawn.
    """

    def __init__(
        self, config: TrainConfig, data: Dataset, *, block_size: int, processes: Processes, start: int
    ) -> None:
        self._config, self._data, self._block_size, self._processes = config, data, block_size, processes
        self._visits = visits(len(data.train), seed=config.seed, start=start, grouping=_grouping(config, data))
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dflash-drawing")
        self._ahead: Future[list[Drawn]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.shutdown(cancel_futures=True)

    def step(self) -> list[Drawn]:
        """The next step's micro-batches; an empty list where this process has no share of it."""
        current = self._ahead or self._worker.submit(self._draw_step)
        self._ahead = self._worker.submit(self._draw_step)
        return current.result()

    def draw(self, chosen: Chosen) -> Drawn:
        """One micro-batch."""
        sequences = [self._data.train[number] for number, _ in chosen]
        blocks = [
            draw_blocks(
                s.token_ids,
                s.loss_mask,
                block_size=self._block_size,
                num_anchors=self._config.data.num_anchors,
                rng=rng,
            )
            for s, (_, rng) in zip(sequences, chosen, strict=True)
        ]
        return Drawn(sequences, blocks)

    def _draw_step(self) -> list[Drawn]:
        optimizer = self._config.optimizer
        chosen = [next(self._visits) for _ in range(optimizer.sequences_per_step)]
        mine = self._processes.share(chosen)
        size = optimizer.micro_batch
        return [self.draw(mine[begin : begin + size]) for begin in range(0, len(mine), size)]


def _grouping(config: TrainConfig, data: Dataset) -> Grouping | None:
    if config.data.length_window == 1:
        return None
    lengths = np.array([len(s.token_ids) for s in data.train])
    return Grouping(lengths, config.optimizer.sequences_per_step, config.data.length_window)
