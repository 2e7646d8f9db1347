"""Lossless block-diffusion speculative decoding (DFlash).

    from dflash import SamplingParams, load

    engine = load("smollm2-135m")
    result = engine.generate("Why is the sky blue?", SamplingParams(max_new_tokens=128))
    print(result.text, result.stats.acceptance_length)

Names are imported on first use: `import dflash` alone loads neither PyTorch nor Transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash.registry import BACKENDS, load_attribute

if TYPE_CHECKING:
    from dflash.backends.torch.engine import load
    from dflash.core.engine import Engine, StreamEvent
    from dflash.core.engine_info import EngineInfo
    from dflash.errors import DFlashError
    from dflash.types import Drafting, Result, SamplingParams, Stats

__all__ = [
    "DFlashError",
    "Drafting",
    "Engine",
    "EngineInfo",
    "Result",
    "SamplingParams",
    "Stats",
    "StreamEvent",
    "load",
]

__version__ = "0.1.0"

_PUBLIC = {
    "DFlashError": "dflash.errors:DFlashError",
    "Drafting": "dflash.types:Drafting",
    "Engine": "dflash.core.engine:Engine",
    "EngineInfo": "dflash.core.engine:EngineInfo",
    "Result": "dflash.types:Result",
    "SamplingParams": "dflash.types:SamplingParams",
    "Stats": "dflash.types:Stats",
    "StreamEvent": "dflash.core.engine:StreamEvent",
    "load": BACKENDS["torch"],
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dflash' has no attribute {name!r}")
    return load_attribute(_PUBLIC[name])


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
