"""The training loop: visits, optimizer steps, checkpoints, metrics and evaluation; knows no algorithm.

A run is a pure function of its recipe: order and anchors are keyed by (seed, visit), so a run that was killed at any
moment and resumed goes on to the same losses and the same records as one that was not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from dflash.backends.torch.loading import end_of_sequence_ids
from dflash.backends.torch.target import TorchTarget
from dflash.core.bigrams import BIGRAMS_FILE
from dflash.errors import CheckpointError, ConfigError
from dflash.prepare.jsonl import read_json_object, write_json_atomically
from dflash.resolve import Progress
from dflash.train import data as data_module
from dflash.train.bigrams import write_bigrams
from dflash.train.checkpoint import Position, load_checkpoint, save_checkpoint
from dflash.train.config import OptimizerConfig, TrainConfig, load_config
from dflash.train.drawing import Drawn, StepDrawer
from dflash.train.evaluate import DecodeReport, decode_report, held_out_figures
from dflash.train.export import RECIPE_FILE, export_draft, write_recipe
from dflash.train.metrics import MetricsWriter
from dflash.train.processes import Processes, SingleProcess
from dflash.train.setup import Run, open_run
from dflash.train.step import Batch, StepFigures, StepSums, collate, summed, training_sums

logger = logging.getLogger(__name__)

DATA_FILE = "data.json"
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
    config_path: Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    progress: Progress | None = None,
    processes: Processes | None = None,
) -> TrainSummary:
    """Train as the recipe says; `resume` continues from the newest checkpoint in its `out` folder.

    `processes` are those that share the run, seen from this one; None = it is alone. Only the main one locks the
    folder and writes into it.

    Raises DFlashError subclasses; a folder that already holds a run is refused without `resume`, and one in which
    another run is at work in any case.
    """
    config = load_config(config_path, overrides)
    processes = processes or SingleProcess()
    started = any((config.out / "checkpoints").glob("step-*"))
    if started and not resume:
        raise ConfigError(f"{config.out} already holds a run; add --resume to continue it, or give another out.")
    held: AbstractContextManager[None] = _held_folder(config.out) if processes.is_main else nullcontext()
    with held:
        run = open_run(config, progress)
        if processes.is_main:
            _check_data(config.out / DATA_FILE, run, started=started)
        trainer = Trainer(config, run, processes)
        if processes.is_main:
            write_recipe(config.out / RECIPE_FILE, config)
        return trainer.train(progress)


def fingerprint(config: TrainConfig) -> str:
    """Of everything in a recipe that may not change between restarts."""
    fixed = {k: v for k, v in json.loads(config.model_dump_json()).items() if k not in _FREE_TO_CHANGE}
    del fixed["data"]["bigrams"]  # not learnt from
    if config.data.length_window == 1:  # younger than the oldest runs that may still be resumed
        del fixed["data"]["length_window"]
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

    def __init__(self, config: TrainConfig, run: Run, processes: Processes | None = None) -> None:
        self.config, self.run = config, run
        self.processes = processes or SingleProcess()
        self.optimizer = torch.optim.AdamW(
            run.network.parameters(),
            lr=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            weight_decay=config.optimizer.weight_decay,
            fused=run.device.type == "cuda",
        )
        self.checkpoints = config.out / "checkpoints"
        self.draft = config.out / "draft"
        found = load_checkpoint(self.checkpoints, run.network, self.optimizer)
        if found is not None and found.recipe != fingerprint(config):
            raise CheckpointError(
                f"the checkpoints in {self.checkpoints} belong to another recipe; restore it, or give another out."
            )
        self.position = found or Position(step=0, visit=0, seconds=0.0, recipe=fingerprint(config))
        self.metrics = MetricsWriter(config.out, resume_step=self.position.step) if self.processes.is_main else None
        self.target = TorchTarget(run.target.model, taps=run.network.config.target_layer_ids)
        self._pending: list[StepSums] = []
        self._logged_seconds = self.position.seconds

    def train(self, progress: Progress | None = None) -> TrainSummary:
        """Run to the last step (or the time limit), exporting the draft at every evaluation and at the end."""
        if self.processes.is_main:
            self._count_neighbours()
        try:
            report = self._steps(progress)
        finally:
            if self.metrics is not None:
                self.metrics.close()
            self.target.close()
        return TrainSummary(self.position.step, self.draft, report.acceptance_length if report else float("nan"))

    def _steps(self, progress: Progress | None) -> DecodeReport | None:
        config, started = self.config, time.perf_counter()
        # A process that was killed may have written the checkpoint of this step, but not its evaluation or its draft.
        report = self._evaluate(progress) if self.position.step and self._evaluates(self.position.step) else None
        with self.drawer() as drawer:
            while self.position.step < config.steps:
                begun, at = time.perf_counter(), self.position
                rate = learning_rate(at.step, config.steps, config.optimizer)
                self._step(drawer.step(), rate)
                now = time.perf_counter()
                visit = at.visit + config.optimizer.sequences_per_step
                self.position = Position(
                    step=at.step + 1, visit=visit, seconds=at.seconds + now - begun, recipe=at.recipe
                )
                out_of_time = self._is_over(now - started)
                report = self._after_step(rate, progress, last=out_of_time) or report
                if out_of_time:
                    break
        return report

    def drawer(self) -> StepDrawer:
        """What the steps from here on learn from."""
        return StepDrawer(
            self.config,
            self.run.data,
            block_size=self.run.network.config.block_size,
            processes=self.processes,
            start=self.position.visit,
        )

    def _is_over(self, seconds: float) -> bool:
        """Whether the recipe's time is up for any process: a step that only some of them begin would never end."""
        limit = self.config.max_minutes
        if limit is None:
            return False
        late = self._addend(torch.tensor([float(seconds > 60 * limit)]))
        self.processes.total([late])
        return late.item() > 0

    def _addend(self, values: Tensor) -> Tensor:
        """`values` ready to be added up over processes: where the gradients are, for they may share no other device."""
        device = self.run.device
        return values.to(device, torch.float32 if device.type == "mps" else values.dtype)  # it has no float64

    def _after_step(self, rate: float, progress: Progress | None, *, last: bool) -> DecodeReport | None:
        """Log, save, evaluate and export where the recipe says so, and at the end."""
        config, step = self.config, self.position.step
        last = last or step == config.steps
        saves = last or step % config.checkpoint_every == 0
        if saves or step % config.log_every == 0:  # at every checkpoint, so that no step is left out of the records
            self._log(rate, progress)
        if saves and self.processes.is_main:
            save_checkpoint(self.checkpoints, self.run.network, self.optimizer, self.position)
        return self._evaluate(progress) if last or self._evaluates(step) else None

    def _evaluates(self, step: int) -> bool:
        return step % self.config.evaluate_every == 0 or step == self.config.steps

    def _step(self, share: Sequence[Drawn], rate: float) -> None:
        sums = []
        for drawn in share:
            result = self.sums(drawn)
            result.loss.backward()
            sums.append(result)
        parameters = list(self.run.network.parameters())
        for parameter in parameters:  # a process whose share is empty adds zeros
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        weight = self._addend(torch.tensor([sum(s.weight for s in sums)], dtype=torch.float64))
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.processes.total([weight, *gradients])
        for gradient in gradients:
            gradient.div_(max(float(weight), 1e-8))
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.optimizer.max_grad_norm)
        if not bool(norm.isfinite()):
            raise ConfigError(
                f"training diverged at step {self.position.step + 1} (gradients are not finite); resume from the last "
                "checkpoint with dtype=float32, or start anew with a lower optimizer.learning_rate."
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._pending.extend(_detached(s) for s in sums)

    def sums(self, drawn: Drawn) -> StepSums:
        """Forward of one micro-batch."""
        config, run = self.config, self.run
        sequences, blocks = drawn
        features = run.features.batch([s.token_ids.tolist() for s in sequences])
        moved = [rows.to(run.device, torch.float32) for rows in features]
        recorded = collate(moved, [s.token_ids for s in sequences], blocks)
        batch = replace(recorded, features_NSF=recorded.features_NSF[..., : run.network.fc.in_features])
        with run.autocast():
            return training_sums(
                run.network,
                run.head,
                batch,
                gamma=config.loss.gamma,
                distill=config.loss.distill,
                teacher_NSH=self._teacher_states(recorded),
            )

    def _teacher_states(self, recorded: Batch) -> Tensor | None:
        """The target's last states, for distillation: `open_run` has them recorded behind the taps."""
        if self.config.loss.distill == 0:
            return None
        return recorded.features_NSF[..., -self.run.network.config.hidden_size :]

    def _log(self, rate: float, progress: Progress | None) -> None:
        pending, self._pending = self._pending, []
        numbers = self._addend(summed(pending, self.run.network.config.block_size))
        self.processes.total([numbers])
        figures = StepFigures.of(numbers)
        seconds = self.position.seconds - self._logged_seconds
        self._logged_seconds = self.position.seconds
        values = {
            "loss": figures.loss,
            "expected_acceptance_length": figures.expected_acceptance_length,
            "slot_accuracy": figures.slot_accuracy,
            "learning_rate": rate,
            "positions_per_second": figures.num_labels / max(seconds, 1e-9),
            "visit": self.position.visit,
            "seconds": self.position.seconds,
        }
        step, steps = self.position.step, self.config.steps
        text = f"step {step}/{steps}  loss {figures.loss:.3f}  expected acceptance "
        text += f"{figures.expected_acceptance_length:.3f}"
        if self.metrics is not None:
            self.metrics.write("train", step, values)
            logger.info("%s", text)
        if progress is not None:
            progress(text, step / steps)

    def _evaluate(self, progress: Progress | None) -> DecodeReport | None:
        """Evaluate on held-out sequences and export the draft (in the main process); what an earlier process found at
        this step stands."""
        if self.metrics is None:
            return None
        step = self.position.step
        self.run.network.eval()
        if self.metrics.earlier("held_out", step) is None:
            with self.run.autocast():
                figures = held_out_figures(
                    self.run.network,
                    self.run.head,
                    self.run.features,
                    self.run.data.held_out,
                    gamma=self.config.loss.gamma,
                )
            self.metrics.write("held_out", step, vars(figures))
        report = None
        if self.config.evaluate_prompts:
            earlier = self.metrics.earlier("decode", step)
            report = self._decode(progress) if earlier is None else DecodeReport(**earlier)
            self.metrics.write("decode", step, vars(report))
        self.run.network.train()
        self._export(report)
        return report

    def _decode(self, progress: Progress | None) -> DecodeReport:
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
        logger.info(
            "step %d: acceptance length %.3f by the decode loop (%.3f averaged per prompt)",
            self.position.step,
            report.acceptance_length,
            report.acceptance_length_per_prompt,
        )
        return report

    def _count_neighbours(self) -> None:
        """Write the counts for the draft to be, once: the answers stay the same. Those of a run that wanted them go."""
        if self.config.data.bigrams:
            write_bigrams(self.draft, self.run.data.train, self.config.data.split_seed)
        else:
            (self.draft / BIGRAMS_FILE).unlink(missing_ok=True)

    def _export(self, report: DecodeReport | None) -> None:
        """Write the draft of this step; a run that is killed later leaves it behind."""
        data = self.run.data
        facts: dict[str, object] = {
            "steps": self.position.step,
            "sequences_seen": self.position.visit,
            "training_hours": round(self.position.seconds / 3600, 3),
            "data": {"sequences": len(data.train), "held_out": len(data.held_out), "fingerprint": data.fingerprint()}
            | {"split": data_module.SPLIT, "split_seed": self.config.data.split_seed},
            "held_out": vars(report) if report else None,
        }
        export_draft(self.run.network, self.draft, self.config, facts)


@contextmanager
def _held_folder(out: Path) -> Iterator[None]:
    """Make the run's folder and keep other runs out of it. Raises ConfigError if that cannot be had."""
    lock = FileLock(out / ".lock", timeout=0)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ConfigError(f"another process is training in {out}; wait for it, or give another out.") from error
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"out {out} cannot be made or written ({reason}); give another folder.") from error
    try:
        yield
    finally:
        lock.release()


def _check_data(path: Path, run: Run, *, started: bool) -> None:
    """Raise ConfigError if the run was started on other sequences: their order would be another, and held-out ones
    could be learnt from."""
    now = {"sequences": len(run.data.train), "held_out": len(run.data.held_out), "fingerprint": run.data.fingerprint()}
    now |= {"split": data_module.SPLIT}
    if started and path.is_file():
        before = read_json_object(path)
        if before.get("split") != data_module.SPLIT:
            raise ConfigError(
                f"{path.parent} was started by a version that held out other prompts; finish it with that version, or "
                "start a new run with init from the exported draft."
            )
        if before != now:
            raise ConfigError(
                f"{path.parent} was started on {before.get('sequences')} sequences (fingerprint "
                f"{before.get('fingerprint')}), but data.answers now gives {now['sequences']} ({now['fingerprint']}); "
                "restore the answers, or start a new run with init from the exported draft."
            )
        return
    write_json_atomically(path, now)


def _detached(sums: StepSums) -> StepSums:
    return replace(sums, loss=sums.loss.detach())
