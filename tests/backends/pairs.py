"""Engines over a tiny pair on disk, and the requests that tests put to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflash import SamplingParams, load
from dflash.backends.torch.engine import TorchEngine as Engine
from dflash.core.engine import Engine as AnyEngine
from dflash.registry import BACKENDS as LOADERS
from dflash.registry import load_attribute
from dflash.types import Result

PROMPTS = ("Why is the sky blue?", "x", "Ein längerer Satz, mit Umlauten: äöü. " * 5)
NUM_TOKENS = 32
"""A wrong row shows within a few tokens; a draft that knows the text takes at least four rounds of whole blocks."""
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=11)


def open_engine(target: Path, draft: Path | None, **options: Any) -> Engine:
    """On one thread of the CPU, in float32 if nothing else is said."""
    return load(target, draft, **{"dtype": "float32", "device": "cpu", "num_threads": 1, **options})


def load_with_taps(target: Path, taps: Sequence[int]) -> Engine:
    """Without a draft, but recording features."""
    engine = open_engine(target, None)
    engine.target = type(engine.target)(engine.target.model, taps=taps)
    return engine


def open_mlx_engine(target: Path, draft: Path | None, **options: Any) -> AnyEngine:
    """On MLX's default device, in float32 if nothing else is said."""
    engine: AnyEngine = load_attribute(LOADERS["mlx"])(target, draft, **{"dtype": "float32", **options})
    return engine


OpenEngine = Callable[..., AnyEngine]
"""(target folder, draft folder or None, **options of `load`) -> an engine."""


class PlainTexts:
    """What plain decoding of one engine says, decoded once per request: many ways of drafting are compared with it."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine
        self._results: dict[str, Result] = {}

    def __call__(self, prompt: str | None = None, params: SamplingParams = GREEDY, **options: Any) -> Result:
        request = repr((prompt, params, options))
        if request not in self._results:
            self._results[request] = self._engine.generate(prompt, params, use_draft=False, **options)
        return self._results[request]


BACKENDS: Mapping[str, OpenEngine] = MappingProxyType({"torch": open_engine, "mlx": open_mlx_engine})
