"""This package's own PyTorch engine as a backend of the benchmark (`bench/own_engine.py`)."""

from __future__ import annotations

import torch

from dflash.backends.torch.engine import TorchEngine, load
from dflash.bench.memory import ProcessMemory
from dflash.bench.own_engine import OwnBackend, load_arguments, loaded_models
from dflash.bench.protocol import BackendOptions, ModelInfo
from dflash.resolve import Progress

_KNOWN = ("target", "draft", "dtype", "device", "threads", "width", "trust_remote_code", "drafting")


def open_backend(options: BackendOptions, progress: Progress) -> TorchBackend:
    """Load the target and its draft. Raises errors of `dflash.load`, and ConfigError for a server's options."""
    options.refuse_others("torch", *_KNOWN)
    engine = load(**load_arguments("torch", options), num_threads=options.threads, progress=progress)
    return TorchBackend(engine, *loaded_models(options, progress))


class TorchBackend(OwnBackend):
    """Implements `dflash.bench.protocol.Backend`."""

    _engine: TorchEngine

    def __init__(self, engine: TorchEngine, target: ModelInfo, draft: ModelInfo) -> None:
        super().__init__(engine, target, draft)
        self._memory = ProcessMemory()

    @property
    def _tells_times(self) -> bool:
        """Not on an asynchronous device."""
        return self._engine.target.device.type == "cpu"

    @property
    def _device_name(self) -> str:
        device = self._engine.target.device
        return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)

    def start_memory(self) -> None:
        """Set the peak of the device, or of the process, back."""
        if self._engine.target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._engine.target.device)
        else:
            self._memory.start()

    def peak_memory_bytes(self) -> int | None:
        """Of the device's allocator, or of the process."""
        if self._engine.target.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._engine.target.device)
        return self._memory.peak_bytes()
