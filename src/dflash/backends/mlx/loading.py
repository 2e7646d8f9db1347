"""Opening a target with mlx-lm: dtype, weights and tokenizer, with errors that name the cure.

Knows mlx-lm's loading functions; does not know drafts' contents, decoding or the command line. Weights come from
safetensors only, and code from a checkpoint runs only if the caller asked for it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash.backends.mlx.compat import adapted_config, layer_caches, text_config
from dflash.core.draft_config import CONFIG_FILE
from dflash.core.pair_checks import end_ids
from dflash.core.safetensors_files import check_weight_files, read_json
from dflash.errors import CheckpointError, ConfigError, ModelError, UnsupportedModel
from dflash.resolve import Progress, Source

logger = logging.getLogger(__name__)

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class LoadedTarget:
    """A target's weights and tokenizer."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    config: Mapping[str, Any]
    """The parsed config.json."""
    folder: Path
    max_length: int
    """Context limit in tokens."""


def check_device(device: str | None) -> None:
    """MLX has one default device per process, which this package leaves alone. Raises ConfigError for another one."""
    default = device_name()
    if device not in (None, "auto", default, "metal" if default == "gpu" else None):
        raise ConfigError(
            f"device '{device}' has no effect on MLX, which computes on its default device ('{default}' here); "
            "leave it out."
        )


def device_name() -> str:
    """MLX's default device: "gpu" on Apple silicon, "cpu" elsewhere."""
    return "gpu" if mx.default_device() == mx.gpu else "cpu"


def choose_dtype(dtype: str | None) -> mx.Dtype | None:
    """None: the checkpoint's own on a GPU, float32 on a CPU (which has no units for halves); returned as None for
    "as it is". Raises ConfigError for an unknown name."""
    if dtype is None or dtype == "auto":
        return None if device_name() == "gpu" else mx.float32
    name = _ALIASES.get(dtype, dtype)
    if name not in DTYPES:
        raise ConfigError(f"dtype '{dtype}' is unknown; use one of {', '.join([*DTYPES, *_ALIASES, 'auto'])}.")
    return DTYPES[name]


def load_target(
    source: Source,
    *,
    dtype: mx.Dtype | None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    role: str = "target",
) -> LoadedTarget:
    """Load a target's weights and tokenizer (a GGUF file by way of its converted copy).

    `dtype`: of the weights that are not quantised; None = as stored. `role`: what the model is to the user, for
    messages. Raises CheckpointError for damaged or incomplete
    weights, UnsupportedModel for what mlx-lm does not know, ModelError for what cannot be read.
    """
    folder = _folder(source, progress)
    check_weight_files(folder)
    if progress is not None:
        progress(f"loading {source.name}", None)
    with _loading_errors(f"{role} '{source.name}'", folder, is_target=role == "target"):
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        model, _ = load_model(
            folder, lazy=True, model_config=adapted_config(config), trust_remote_code=trust_remote_code
        )
        if dtype is not None:
            model.set_dtype(dtype)
        mx.eval(model.parameters())
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    length = context_length(config, source.name)
    window = forgotten_window(model, text_config(config))
    if window is not None and window < length:
        logger.warning(
            "mlx-lm does not apply the attention window of '%s'; up to its %d tokens both are equal, so the context is "
            "limited to them.",
            source.name,
            window,
        )
        length = window
    return LoadedTarget(model, tokenizer, config, folder, length)


def forgotten_window(model: nn.Module, config: Mapping[str, Any]) -> int | None:
    """Length of the attention window that a configuration asks for and mlx-lm's model does not apply; None = none."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    asked = isinstance(window, int) and config.get("use_sliding_window", True)
    if not asked or (kinds is not None and "sliding_attention" not in kinds):
        return None
    applied = any(type(cache).__name__ == "RotatingKVCache" for cache in layer_caches(model))
    return None if applied else window


def context_length(config: Mapping[str, Any], name: str) -> int:
    """Context limit of a parsed config.json.

    Raises:
        UnsupportedModel: none is given, or the rotary frequencies depend on the length of a forward, so that a block
            that crosses a limit would differ from single steps.
    """
    inner = text_config(config)
    length = inner.get("max_position_embeddings", config.get("max_position_embeddings"))
    if not isinstance(length, int):
        raise UnsupportedModel(
            f"the configuration of '{name}' gives no max_position_embeddings; add the context length."
        )
    rope = inner.get("rope_parameters") or inner.get("rope_scaling") or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    kinds = {part.get("rope_type", part.get("type")) for part in parts}
    if found := kinds & {"dynamic", "longrope", "su"}:
        raise UnsupportedModel(
            f"rotary embedding {found.pop()!r} changes with the length of a forward, so that blocks cannot equal "
            "single steps; use a target with a fixed rope_type (default, linear, yarn, llama3)."
        )
    return length


def end_of_sequence_ids(loaded: LoadedTarget) -> frozenset[int]:
    """All end-of-sequence ids of the generation config; the model's or tokenizer's own where it names none."""
    path = loaded.folder / "generation_config.json"
    generation = read_json(path, "target's generation config") if path.is_file() else {}
    inner = text_config(loaded.config)
    named = (generation.get("eos_token_id"), loaded.config.get("eos_token_id"), inner.get("eos_token_id"))
    return end_ids((*named, loaded.tokenizer.eos_token_id), loaded.folder.name)


def _folder(source: Source, progress: Progress | None) -> Path:
    if not source.is_gguf:
        return source.path
    # The conversion is made once, by Transformers, and serves both backends.
    from dflash.backends.torch.gguf import converted_folder

    return converted_folder(source, progress=progress)


@contextmanager
def _loading_errors(what: str, folder: Path, *, is_target: bool) -> Iterator[None]:
    """Turn what mlx-lm, MLX and tokenizers raise into errors that name the cure; `what`: the model, for messages."""
    try:
        yield
    except ValueError as error:
        text = _first_line(error)
        if "trust_remote_code" in str(error):
            cure = (
                "if you have read it and trust it, pass trust_remote_code=True (--trust-remote-code)."
                if is_target
                else "use a draft without code of its own."
            )
            raise ModelError(f"{what} brings its own Python code. Nothing of it was run; {cure}") from error
        if "not supported" in text:
            raise UnsupportedModel(
                f"{what} is no language model that the installed mlx-lm knows ({text}); upgrade mlx-lm, use "
                "--backend torch, or choose another one."
            ) from error
        if "parameters" in text or "shape" in text:
            raise CheckpointError(
                f"the weights of {what} in {folder} do not fit its config.json ({text}); download it again."
            ) from error
        raise _unreadable(what, folder, error) from error
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights of {what} in {folder} are damaged ({_first_line(error)}); download it again."
        ) from error
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(what, folder, error) from error


def _unreadable(what: str, folder: Path, error: BaseException) -> ModelError:
    return ModelError(
        f"{what} in {folder} cannot be read ({type(error).__name__}: {_first_line(error)}); "
        "check that it holds config.json, safetensors weights and a tokenizer."
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
