"""Engines over a tiny pair on disk, and the requests that tests put to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash import SamplingParams, load
from dflash.backends.torch.engine import TorchEngine as Engine

PROMPTS = ("Why is the sky blue?", "x", "Ein längerer Satz, mit Umlauten: äöü. " * 5)
GREEDY = SamplingParams(max_new_tokens=60, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=1.0, seed=11)


def open_engine(target: Path, draft: Path | None, **options: Any) -> Engine:
    """On one thread of the CPU, in float32 if nothing else is said."""
    return load(target, draft, **{"dtype": "float32", "device": "cpu", "num_threads": 1, **options})


def load_with_taps(target: Path, taps: Sequence[int]) -> Engine:
    """Without a draft, but recording features."""
    engine = open_engine(target, None)
    engine.target = type(engine.target)(engine.target.model, taps=taps)
    return engine
