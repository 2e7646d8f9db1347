"""Opening a target: device, dtype, threads, weights and tokenizer, with errors that name the cure.

Knows Transformers' loading functions; does not know drafts' contents, decoding or the command line. Weights come from
safetensors only, and code from a checkpoint runs only if the caller asked for it.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from dflash.backends.torch.compat import auto_class, text_config
from dflash.backends.torch.gguf import converted_folder
from dflash.core.draft_config import DraftConfig
from dflash.core.pair import TargetShape, check_shapes
from dflash.core.pair_checks import end_ids
from dflash.core.safetensors_files import check_weight_files
from dflash.errors import CheckpointError, ConfigError, MissingExtra, ModelError, UnsupportedModel
from dflash.resolve import Progress, Source, resolve_target

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPREADS = ("balanced", "balanced_low_0", "sequential")
"""Names in place of a device: Transformers' ways to spread a target's layers over all GPUs (its `device_map`)."""
_DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "auto": None}
MOST_THREADS = 4096
"""More is a mistake, which OpenMP would answer by ending the process."""
_BF16_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
"""x86 and ARM names of bf16 units in /proc/cpuinfo. Without them bf16 is emulated and several times slower."""


@dataclass(frozen=True)
class LoadedTarget:
    """A target's weights and tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path


def choose_device(device: str | None) -> torch.device:
    """None: the first CUDA device if there is one, else the CPU; of a spread target (`SPREADS`) the first CUDA device,
    where features, masks and the draft are. Raises ConfigError for a device that is not there."""
    if device in SPREADS:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device '{device}' spreads the target over the NVIDIA GPUs of this machine, and there is none; use "
                "'cpu', or leave it out."
            )
        return torch.device("cuda", 0)
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # builds without CUDA assert
        raise ConfigError(
            f"device '{device}' is not usable here ({_first_line(error)}); use 'cpu', 'cuda', 'cuda:1', 'mps' or, "
            f"to spread a target over several GPUs, one of {', '.join(SPREADS)}; or leave it out."
        ) from error
    if chosen.type == "meta":
        raise ConfigError("device 'meta' holds no numbers; use 'cpu' or 'cuda'.")
    return chosen


def spread_of(device: str | None) -> str | None:
    """The way to spread a target that a choice of device names; None = it names one device."""
    return device if device in SPREADS else None


def choose_dtype(dtype: str | None, device: torch.device, *, cpu_flags: frozenset[str] | None = None) -> torch.dtype:
    """None: bfloat16 where the device computes in it, else float32. Raises ConfigError for an unknown name.

    `cpu_flags` replaces the processor's own in tests.
    """
    name = _DTYPE_ALIASES.get(dtype, dtype) if dtype is not None else None
    if name is not None:
        if name not in DTYPES:
            known = ", ".join([*DTYPES, *(alias for alias, full in _DTYPE_ALIASES.items() if full)])
            raise ConfigError(f"dtype '{dtype}' is unknown; use one of {known}.")
        return DTYPES[name]
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        fast = bool(_BF16_CPU_FLAGS & (_cpu_flags() if cpu_flags is None else cpu_flags))
    else:
        fast = False
    return torch.bfloat16 if fast else torch.float32


def set_threads(num_threads: int | None) -> int:
    """Set PyTorch's number of CPU threads (process-wide) and return it.

    None: the physical cores this process may use, but not more than PyTorch is already limited to, so that
    OMP_NUM_THREADS or an earlier `torch.set_num_threads` keeps its effect.

    Raises ConfigError below 1 or beyond MOST_THREADS.
    """
    if num_threads is None:
        num_threads = min(physical_cores(), torch.get_num_threads())
    elif num_threads < 1:
        raise ConfigError(f"the number of threads must be at least 1, not {num_threads}.")
    elif num_threads > MOST_THREADS:
        raise ConfigError(f"the number of threads must be at most {MOST_THREADS}, not {num_threads}.")
    torch.set_num_threads(num_threads)
    return num_threads


def physical_cores(*, topology: Path = Path("/sys/devices/system/cpu"), quota: Path | None = None) -> int:
    """Physical cores this process may run on: its CPU affinity, hyper-threads counted once, capped by a
    container's CPU quota. The paths are replaced in tests."""
    if sys.platform == "linux":
        usable = os.sched_getaffinity(0)
    else:
        usable = set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in usable:
        try:
            cores.add((topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:  # no such file system here: count every CPU
            cores.add(str(cpu))
    limit = len(cores)
    try:
        granted, period = (quota or Path("/sys/fs/cgroup/cpu.max")).read_text().split()
        if granted != "max":
            limit = min(limit, max(1, int(granted) // int(period)))
    except (OSError, ValueError):
        pass  # no quota is set, or not in this form
    return limit


def open_target(
    spec: str,
    *,
    dtype: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> LoadedTarget:
    """Find and load a target by what the user wrote, for clients that need the bare model (prepare, train).

    Arguments and errors as in `dflash.load`; threads are left alone.
    """
    place = choose_device(device)
    source = resolve_target(spec, allow_code=trust_remote_code, progress=progress)
    return load_target(
        source,
        dtype=choose_dtype(dtype, place),
        device=place,
        spread=spread_of(device),
        trust_remote_code=trust_remote_code,
        progress=progress,
    )


def load_target(
    source: Source,
    *,
    dtype: torch.dtype,
    device: torch.device,
    spread: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    role: str = "target",
) -> LoadedTarget:
    """Load a target's weights and tokenizer (a GGUF file by way of its converted copy).

    `spread`: one of SPREADS, over all GPUs instead of `device`. `role` is for messages: what the model is to the user.

    Raises CheckpointError for damaged or incomplete weights, UnsupportedModel for what is no causal language
    model, ModelError for what cannot be read, ConfigError for what does not fit into memory.
    """
    folder = converted_folder(source, progress=progress) if source.is_gguf else source.path
    check_weight_files(folder)
    if progress is not None:
        progress(f"loading {source.name}", None)
    what, cpu = f"{role} '{source.name}'", torch.device("cpu")
    with (
        fits_memory(what, dtype, cpu),
        _loading_errors(source, folder, role),
        _bars_to(progress, f"loading {source.name}"),
    ):
        options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        config = AutoConfig.from_pretrained(folder, **options)
        # Quantised weights cannot be moved any more, so they are put where they belong at once.
        quantised = getattr(config, "quantization_config", None) is not None
        loaded: Any = auto_class(config).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            device_map=spread or ({"": device} if quantised else None),
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
        model, info = loaded
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise CheckpointError(
            f"the weights of '{source.name}' in {folder} lack {len(missing)} tensors (first: {missing[0]}), which "
            "would be random numbers; download the model again."
        )
    if info["unexpected_keys"]:
        logger.info("'%s': %d tensors are not used by this model class", source.name, len(info["unexpected_keys"]))
    with fits_memory(what, dtype, device):
        model = model if quantised or spread else model.to(device)
    _check_places(model, what)
    return LoadedTarget(model.eval(), tokenizer, folder)


def _check_places(model: PreTrainedModel, what: str) -> None:
    """Raise ConfigError for a spread model of which a part would be fetched from the CPU or the disk in every forward:
    such weights are not there to be read, and no draft pays for that."""
    places: dict[str, object] = getattr(model, "hf_device_map", None) or {}
    outside = [name for name, place in places.items() if str(place) in ("cpu", "disk")]
    if outside and len(set(map(str, places.values()))) > 1:
        raise ConfigError(
            f"{what} does not fit into the memory of the GPUs ({len(outside)} of its {len(places)} parts are left "
            f"over, first {outside[0]}); use a smaller or quantised model, dtype bfloat16, or device cpu."
        )


@contextmanager
def fits_memory(what: str, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Around whatever puts weights of `dtype` on `device`. Raises ConfigError if they do not fit, with what would."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not _is_out_of_memory(error):
            raise
        cures = ["a smaller model"]
        cures += ["dtype bfloat16"] if dtype == torch.float32 else []
        cures += ["device cpu"] if device.type != "cpu" else []
        raise ConfigError(
            f"{what} in {str(dtype).removeprefix('torch.')} does not fit into the memory of device {device}; "
            f"use {' or '.join(reversed(cures))}."
        ) from error


def check_pair(draft: DraftConfig, model: PreTrainedModel, *, draft_name: str, target_name: str) -> None:
    """Raise PairError unless the draft was made for a target of this shape.

    A draft without an embedding or head of its own uses the target's, so widths and vocabularies must agree.
    """
    target = text_config(model)
    check_shapes(
        draft,
        TargetShape(target.vocab_size, target.hidden_size, target.num_hidden_layers),
        draft_name=draft_name,
        target_name=target_name,
    )


def end_of_sequence_ids(loaded: LoadedTarget) -> frozenset[int]:
    """All end-of-sequence ids of the generation config; the model's or tokenizer's own where it names none."""
    generation = getattr(loaded.model, "generation_config", None)
    owners = (generation, loaded.model.config, loaded.tokenizer)
    return end_ids((getattr(owner, "eos_token_id", None) for owner in owners), loaded.folder.name)


@contextmanager
def _loading_errors(source: Source, folder: Path, role: str) -> Iterator[None]:
    """Turn what Transformers, safetensors and tokenizers raise into errors that name the cure."""
    again = "download it again" if not source.is_gguf else f"delete {folder} to have it converted again"
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(
            f"the weights of '{source.name}' in {folder} are damaged ({_first_line(error)}); {again}."
        ) from error
    except ImportError as error:
        raise MissingExtra(f"{role} '{source.name}' needs a further package: {_first_line(error)}") from error
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        if _is_out_of_memory(error):
            raise
        text = str(error)
        if "trust_remote_code" in text:
            raise ModelError(
                f"{role} '{source.name}' brings its own Python code. Nothing of it was run; "
                + (
                    "if you have read it and trust it, pass trust_remote_code=True (--trust-remote-code)."
                    if role == "target"
                    else "use a draft without code of its own."
                )
            ) from error
        if "Unrecognized configuration class" in text or "does not recognize this architecture" in text:
            raise UnsupportedModel(
                f"{role} '{source.name}' is no causal language model that the installed Transformers knows "
                f"({_first_line(error)}); upgrade Transformers, or choose another one."
            ) from error
        if "size mismatch" in text or "mismatched" in text:
            raise CheckpointError(
                f"the weights of '{source.name}' in {folder} do not fit its config.json "
                f"({_first_line(error)}); {again}."
            ) from error
        raise ModelError(
            f"{role} '{source.name}' in {folder} cannot be read ({type(error).__name__}: {_first_line(error)}); "
            "check that it holds config.json, safetensors weights and a tokenizer."
        ) from error


@contextmanager
def _bars_to(progress: Progress | None, what: str) -> Iterator[None]:
    """Inside, Transformers' loading bars stay off the terminal and their share goes to `progress`."""

    def hook(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            args = (_counted(args[0], progress, what), *args[1:])
        return factory(*args, **{**kwargs, "disable": True})

    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


def _counted(items: Any, progress: Progress | None, what: str) -> Iterator[Any]:
    total = len(items) if hasattr(items, "__len__") else 0
    for done, item in enumerate(items):
        if progress is not None and total:
            progress(what, done / total)
        yield item


def _is_out_of_memory(error: BaseException) -> bool:
    """Python's, the system's, CUDA's, and that of PyTorch's CPU allocator, which is a RuntimeError like any other."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _cpu_flags() -> frozenset[str]:
    """Feature words of the first processor (Linux; empty elsewhere)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
