"""A whole training run that fits into seconds: a tiny target on disk, its own greedy answers, a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from dflash.backends.torch.loading import open_target
from dflash.train.trainer import TrainSummary, run_training
from tests.backends.tiny_pair import END, MASK, save_target
from tests.prepare.tiny_target import write_rows

NUM_ANSWERS, ANSWER_TOKENS = 48, 40
NETWORK = {"num_layers": 2, "block_size": 5, "target_layer_ids": [0, 2], "mask_token_id": MASK}


def make_pair(folder: Path) -> Path:
    """Write `target` and `answers.jsonl`: greedy answers to random prompts of eight bytes.

    The target's layers add little to their input, so that its next token hangs mostly on the last one: answers run into
    cycles of some ten tokens, which a draft can learn in a minute and an untrained one cannot guess.
    """
    save_target(folder / "target")
    model = open_target(str(folder / "target"), dtype="float32", device="cpu").model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.002)
    model.save_pretrained(folder / "target")
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(256, (NUM_ANSWERS, 8), generator=generator)
    with torch.inference_mode():
        made: torch.Tensor = model.generate(  # type: ignore[operator]
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=END,
            suppress_tokens=[END, MASK],
        )
    rows = [
        {"id": f"p{n}", "prompt_ids": row[:8].tolist(), "answer_ids": row[8:].tolist()} for n, row in enumerate(made)
    ]
    write_rows(folder / "answers.jsonl", rows)
    return folder


def recipe(folder: Path, out: Path, **changes: Any) -> Path:
    """A recipe for the pair in `folder`; `changes` replace top-level keys or update sections."""
    values: dict[str, Any] = {
        "target": str(folder / "target"),
        "out": str(out),
        "network": NETWORK,
        "data": {"answers": [str(folder / "answers.jsonl")], "num_anchors": 24, "held_out": 8},
        "optimizer": {"learning_rate": 4e-3, "warmup_steps": 5, "sequences_per_step": 2},
        "steps": 8,
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "checkpoint_every": 4,
        "evaluate_every": 4,
        "evaluate_prompts": 2,
        "evaluate_tokens": 8,
        "log_every": 2,
    }
    for key, value in changes.items():
        values[key] = values[key] | value if isinstance(value, dict) and key in values else value
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.parent / f"{out.name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def run(folder: Path, out: Path, *, resume: bool = False, **changes: Any) -> TrainSummary:
    """Train in this process."""
    return run_training(recipe(folder, out, **changes), resume=resume)


def metrics(out: Path, kind: str) -> list[dict[str, Any]]:
    """Records of one kind, times taken out (they differ between runs)."""
    timed = ("seconds", "positions_per_second")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in timed} for line in lines if line["kind"] == kind]
