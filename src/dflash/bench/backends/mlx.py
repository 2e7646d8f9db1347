"""This package's own MLX engine as a backend of the benchmark (`bench/own_engine.py`)."""

from __future__ import annotations

from types import ModuleType

from dflash.bench.own_engine import OwnBackend, load_arguments, loaded_models
from dflash.bench.protocol import BackendOptions
from dflash.registry import backend_loader
from dflash.resolve import Progress

_KNOWN = ("target", "draft", "dtype", "device", "width", "trust_remote_code", "drafting")


def open_backend(options: BackendOptions, progress: Progress) -> MLXBackend:
    """Load the target and its draft. Raises errors of the MLX engine's `load`, MissingExtra without MLX, and
    ConfigError for options of servers and for a number of threads."""
    options.refuse_others("mlx", *_KNOWN)
    engine = backend_loader("mlx")(**load_arguments("mlx", options), progress=progress)
    return MLXBackend(engine, *loaded_models(options, progress))


class MLXBackend(OwnBackend):
    """Implements `dflash.bench.protocol.Backend`."""

    _tells_times = False
    """Drafting and verifying are handed to the device as one graph, on a CPU too."""

    def start_memory(self) -> None:
        """Set the peak of MLX's allocator back."""
        _mlx().reset_peak_memory()

    def peak_memory_bytes(self) -> int | None:
        """Of MLX's allocator, weights included."""
        return int(_mlx().get_peak_memory())


def _mlx() -> ModuleType:
    """Imported on use, so that a missing MLX is an error that names the cure."""
    import mlx.core as mx

    return mx
