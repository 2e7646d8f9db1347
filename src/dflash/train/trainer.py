"""The training loop: visits, optimizer steps, checkpoints, metrics and evaluation; knows no algorithm.

A run is a pure function of its recipe: order and anchors are keyed by (seed, visit), so a run that was killed at any
moment and resumed goes on to the same losses as one that was not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash.backends.torch.loading import end_of_sequence_ids
from dflash.backends.torch.target import TorchTarget
from dflash.errors import CheckpointError, ConfigError
from dflash.resolve import Progress
from dflash.train import data as data_module
from dflash.train.anchors import draw_blocks
from dflash.train.checkpoint import Position, load_checkpoint, save_checkpoint
from dflash.train.config import OptimizerConfig, TrainConfig, load_config
from dflash.train.evaluate import DecodeReport, decode_report
from dflash.train.export import RECIPE_FILE, export_draft, write_recipe
from dflash.train.metrics import MetricsWriter
from dflash.train.setup import Run, prepare_run
from dflash.train.step import Batch, StepSums, collate, training_sums

logger = logging.getLogger(__name__)

_FREE_TO_CHANGE = {"out", "device", "num_threads", "dtype", "log_every", "checkpoint_every", "evaluate_every"}
_FREE_TO_CHANGE |= {"evaluate_prompts", "evaluate_tokens", "max_minutes"}


@dataclass(frozen=True)
class TrainSummary:
    """How a call of `run_training` ended."""

    steps: int
    draft: Path
    """The exported draft."""
    acceptance_length: float
    """By the real decode loop on held-out prompts; nan without evaluation prompts."""


def run_training(
    config_path: Path, overrides: Sequence[str] = (), *, resume: bool = False, progress: Progress | None = None
) -> TrainSummary:
    """Train as the recipe says; `resume` continues from the newest checkpoint in its `out` folder.

    Raises DFlashError subclasses; a folder that already holds a run is refused without `resume`.
    """
    config = load_config(config_path, overrides)
    started = (config.out / "checkpoints").is_dir() and any((config.out / "checkpoints").glob("step-*"))
    if started and not resume:
        raise ConfigError(f"{config.out} already holds a run; add --resume to continue it, or give another out.")
    config.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, prepare_run(config, progress))
    write_recipe(config.out / RECIPE_FILE, config)
    return trainer.train(progress)


def fingerprint(config: TrainConfig) -> str:
    """Of everything in a recipe that may not change between restarts."""
    fixed = {k: v for k, v in json.loads(config.model_dump_json()).items() if k not in _FREE_TO_CHANGE}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Linear warm-up, then cosine, or constant with a linear end; the rate of optimizer step `step` (from 0)."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    low, high = config.min_learning_rate, config.learning_rate
    if config.schedule == "cosine":
        share = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        return low + (high - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    tail = max(1, round(steps * config.decay_share))
    return low + (high - low) * min(1.0, (steps - step) / tail)


class Trainer:
    """One run in memory."""

    def __init__(self, config: TrainConfig, run: Run) -> None:
        self.config, self.run = config, run
        self.optimizer = torch.optim.AdamW(
            run.network.parameters(),
            lr=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            weight_decay=config.optimizer.weight_decay,
            fused=run.device.type == "cuda",
        )
        self.checkpoints = config.out / "checkpoints"
        found = load_checkpoint(self.checkpoints, run.network, self.optimizer)
        if found is not None and found.recipe != fingerprint(config):
            raise CheckpointError(
                f"the checkpoints in {self.checkpoints} belong to another recipe; restore it, or give another out."
            )
        self.position = found or Position(step=0, visit=0, seconds=0.0, recipe=fingerprint(config))
        self.metrics = MetricsWriter(config.out, resume_step=self.position.step)
        self.target = TorchTarget(run.target.model, taps=run.network.config.target_layer_ids)
        self._pending: list[StepSums] = []
        self._logged_seconds = self.position.seconds

    def train(self, progress: Progress | None = None) -> TrainSummary:
        """Run to the last step (or the time limit), then export."""
        config, started = self.config, time.perf_counter()
        before = self.position.seconds
        visits = data_module.visits(len(self.run.data.train), seed=config.seed, start=self.position.visit)
        step, visit = self.position.step, self.position.visit
        report: DecodeReport | None = None
        while step < config.steps:
            rate = learning_rate(step, config.steps, config.optimizer)
            chosen = [next(visits) for _ in range(config.optimizer.sequences_per_step)]
            self._step(chosen, rate)
            step, visit = step + 1, visit + len(chosen)
            seconds = before + time.perf_counter() - started
            self.position = Position(step=step, visit=visit, seconds=seconds, recipe=self.position.recipe)
            out_of_time = config.max_minutes is not None and time.perf_counter() - started > 60 * config.max_minutes
            last = step == config.steps or out_of_time
            if step % config.log_every == 0 or last:
                self._log(rate, progress)
            if step % config.checkpoint_every == 0 or last:
                save_checkpoint(self.checkpoints, self.run.network, self.optimizer, self.position)
            if config.evaluate_prompts and (step % config.evaluate_every == 0 or last):
                report = self._evaluate(progress)
            if out_of_time:
                break
        folder = self._export(report)
        self.metrics.close()
        self.target.close()
        return TrainSummary(step, folder, report.acceptance_length if report else float("nan"))

    def _step(self, chosen: list[tuple[int, np.random.Generator]], rate: float) -> None:
        size = self.config.optimizer.micro_batch
        sums = []
        for start in range(0, len(chosen), size):
            result = self.sums(chosen[start : start + size])
            result.loss.backward()
            sums.append(result)
        weight = sum(s.weight for s in sums)
        parameters = [p for p in self.run.network.parameters() if p.grad is not None]
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.div_(max(weight, 1e-8))
        torch.nn.utils.clip_grad_norm_(parameters, self.config.optimizer.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._pending.extend(_detached(s) for s in sums)

    def sums(self, chosen: Sequence[tuple[int, np.random.Generator]]) -> StepSums:
        """Forward of one micro-batch of (sequence number, generator of its anchors)."""
        config, run = self.config, self.run
        sequences = [run.data.train[number] for number, _ in chosen]
        blocks = [
            draw_blocks(
                s.token_ids,
                s.loss_mask,
                block_size=run.network.config.block_size,
                num_anchors=config.data.num_anchors,
                rng=rng,
            )
            for s, (_, rng) in zip(sequences, chosen, strict=True)
        ]
        features = [run.features.features(s.token_ids.tolist()).to(run.device, torch.float32) for s in sequences]
        batch: Batch = collate(features, [s.token_ids for s in sequences], blocks)
        with run.autocast():
            return training_sums(
                run.network,
                run.head,
                batch,
                gamma=config.loss.gamma,
                distill=config.loss.distill,
                teacher_NSH=self._teacher_states(batch),
            )

    def _teacher_states(self, batch: Batch) -> Tensor | None:
        """Distillation needs the target's last states, which are features when the last layer is tapped."""
        if self.config.loss.distill == 0:
            return None
        draft = self.run.network.config
        if draft.target_layer_ids[-1] != self.target.num_layers - 1:
            raise ConfigError("loss.distill needs the target's last layer among target_layer_ids; add it, or set 0.")
        return batch.features_NSF[..., -draft.hidden_size :]

    def _log(self, rate: float, progress: Progress | None) -> None:
        pending, self._pending = self._pending, []
        weight = sum(s.weight for s in pending)
        loss = float(sum(float(s.loss) for s in pending)) / max(weight, 1e-8)
        blocks = sum(s.num_blocks for s in pending)
        accepted = sum(s.accepted for s in pending) / max(blocks, 1)
        correct = torch.stack([s.correct_T for s in pending]).sum(0)
        supervised = torch.stack([s.supervised_T for s in pending]).sum(0)
        accuracy = (correct / supervised.clamp(min=1)).tolist()
        seconds = self.position.seconds - self._logged_seconds
        self._logged_seconds = self.position.seconds
        values = {
            "loss": loss,
            "expected_acceptance_length": accepted,
            "slot_accuracy": [round(a, 4) for a in accuracy],
            "learning_rate": rate,
            "positions_per_second": float(supervised.sum()) / max(seconds, 1e-9),
            "visit": self.position.visit,
            "seconds": self.position.seconds,
        }
        self.metrics.write("train", self.position.step, values)
        text = f"step {self.position.step}/{self.config.steps}  loss {loss:.3f}  expected acceptance {accepted:.3f}"
        if progress is not None:
            progress(text, self.position.step / self.config.steps)
        logger.info("%s", text)

    def _evaluate(self, progress: Progress | None) -> DecodeReport:
        config = self.config
        prompts = [s.token_ids[: s.num_prompt].tolist() for s in self.run.data.held_out[: config.evaluate_prompts]]
        report = decode_report(
            self.run.network,
            self.target,
            prompts,
            eos_ids=end_of_sequence_ids(self.run.target),
            max_new_tokens=config.evaluate_tokens,
            progress=None if progress is None else lambda n: progress("decoding held-out prompts", n / len(prompts)),
        )
        self.metrics.write("decode", self.position.step, vars(report))
        logger.info(
            "step %d: acceptance length %.3f by the decode loop (%.3f averaged per prompt)",
            self.position.step,
            report.acceptance_length,
            report.acceptance_length_per_prompt,
        )
        return report

    def _export(self, report: DecodeReport | None) -> Path:
        folder = self.config.out / "draft"
        facts: dict[str, object] = {
            "steps": self.position.step,
            "sequences_seen": self.position.visit,
            "training_hours": round(self.position.seconds / 3600, 3),
            "held_out": vars(report) if report else None,
        }
        export_draft(self.run.network, folder, self.config, facts)
        return folder


def _detached(sums: StepSums) -> StepSums:
    return StepSums(sums.loss.detach(), sums.weight, sums.correct_T, sums.supervised_T, sums.accepted, sums.num_blocks)
