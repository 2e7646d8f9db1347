"""The training recipe: one validated YAML file plus `section.key=value` overrides.

Every field has one default, written here; an unknown key is an error. The resolved recipe is stored beside the
weights so that a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash.errors import ConfigError
from dflash.train.recipe_errors import faults

Share = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class NetworkConfig(_Section):
    """Shape and start of a new draft. With `init` the draft brings its own shape; keys that contradict it are
    refused."""

    num_layers: int = Field(3, ge=1, description="Layers of the draft network.")
    block_size: int = Field(8, ge=2, description="B: slots per block, anchor slot included.")
    target_layer_ids: list[int] | None = Field(
        None, description="Taps z (output of decoder layer z); default: evenly spread up to the last layer but one."
    )
    num_taps: int = Field(5, ge=1, description="How many taps to spread when target_layer_ids is not given.")
    mask_token_id: int | None = Field(
        None, description="Id for mask slots; default: the last special token that the data does not use."
    )
    draft_vocabulary_size: int = Field(
        0, ge=0, description="Score only the most frequent answer tokens (rows of the target's head); 0 = all."
    )
    num_attention_heads: int | None = Field(None, ge=1, description="Query heads; default: the target's.")
    num_key_value_heads: int | None = Field(None, ge=1, description="Key/value heads; default: the target's.")
    intermediate_size: int | None = Field(None, ge=1, description="Feed-forward width; default: the target's.")
    start: Literal["target", "routed", "random"] = Field(
        "target",
        description="target: layers copied from the target's last; routed: attention made to find the anchor and the "
        "latest context rows; random: small normal weights.",
    )


class DataConfig(_Section):
    """What is learnt from."""

    answers: list[Path] = Field(description="Files or folders of answers made by `dflash prepare`.")
    max_length: int = Field(512, ge=8, description="Longer sequences are cut (tokens, prompt included).")
    num_anchors: int = Field(128, ge=1, description="Blocks per sequence and epoch, drawn anew each time.")
    held_out: int = Field(
        64,
        ge=1,
        description="Sequences kept apart for evaluation, by a hash of their prompts: the same ones in any file. All "
        "turns of a conversation stay on one side.",
    )
    bigrams: bool = Field(
        True,
        description="Count which tokens follow one another in the answers and keep that beside the weights: where "
        "drafting goes by cost, the draft's guesses then fit together.",
    )
    split_seed: int = Field(0, ge=0, description="Which sequences are held out and which the limit keeps.")
    limit: int | None = Field(None, ge=1, description="Learn from only the first so many sequences (by that hash).")
    length_window: int = Field(
        1,
        ge=1,
        description="Steps drawn together and sorted by length among themselves, so that wide batches on a GPU pad "
        "little; 1 = any lengths side by side.",
    )
    features: Literal["online", "cached"] = Field(
        "online", description="Compute features in each step, or keep them on disk after the first visit."
    )
    features_folder: Path | None = Field(None, description="Where cached features live; default: <out>/features.")


class OptimizerConfig(_Section):
    """AdamW with warm-up and decay."""

    learning_rate: float = Field(1e-3, gt=0, description="Highest rate, reached at the end of the warm-up.")
    min_learning_rate: float = Field(1e-5, ge=0, description="Rate at the last step.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay, on all weights alike.")
    betas: tuple[Share, Share] = Field((0.9, 0.95), description="Decay of the two moments.")
    schedule: Literal["cosine", "constant"] = Field(
        "cosine", description="From the highest rate to the last: cosine, or constant with a linear end."
    )
    decay_share: float = Field(0.2, gt=0, le=1, description="Share of the steps in the linear end of constant.")
    warmup_steps: int = Field(100, ge=0, description="Steps in which the rate grows from 0 to the highest.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients of a larger norm are scaled down to it.")
    sequences_per_step: int = Field(4, ge=1, description="Sequences per optimizer step (accumulated).")
    micro_batch: int = Field(1, ge=1, description="Sequences per forward, at most sequences_per_step; larger on a GPU.")

    @model_validator(mode="after")
    def _fills_micro_batches(self) -> Self:
        if self.micro_batch > self.sequences_per_step:
            raise ValueError(
                f"micro_batch {self.micro_batch} has no effect beyond sequences_per_step {self.sequences_per_step}; "
                "lower it, or raise sequences_per_step"
            )
        return self


class LossConfig(_Section):
    """Weighted cross-entropy (docs/training.md)."""

    gamma: float = Field(4.0, gt=0, description="Slot i weighs exp(-(i-1)/gamma).")
    distill: float = Field(
        0.0, ge=0, le=1, description="Share of the target's own distribution in the label (0 = hard labels only)."
    )


class TrainConfig(_Section):
    """The whole recipe."""

    target: str = Field(description="Target: hub id, folder, GGUF file or built-in name.")
    out: Path = Field(description="Folder of the run: checkpoints, metrics, exported draft.")
    init: str | None = Field(
        None, description="Continue from this v1 draft (folder, hub id or built-in name), vocabulary included."
    )
    network: NetworkConfig = NetworkConfig()  # type: ignore[call-arg]
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()  # type: ignore[call-arg]
    loss: LossConfig = LossConfig()  # type: ignore[call-arg]
    steps: int = Field(2000, ge=1, description="Optimizer steps in all (the cosine's length).")
    max_minutes: float | None = Field(None, gt=0, description="Stop (checkpointed, exported) after so long.")
    seed: int = Field(0, ge=0, description="Key of every random draw: start weights, order of sequences, anchors.")
    device: str | None = Field(None, description="cpu, cuda, cuda:1, ...; default: the GPU if there is one.")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Compute type of the forward passes; weights stay float32. Default: the machine's fast one."
    )
    num_threads: int | None = Field(None, ge=1, description="CPU threads; default: the physical cores.")
    checkpoint_every: int = Field(200, ge=1, description="Steps between checkpoints.")
    evaluate_every: int = Field(500, ge=1, description="Steps between evaluations on held-out sequences.")
    evaluate_prompts: int = Field(
        16, ge=0, description="Held-out prompts decoded per evaluation by the real decode loop; 0 = none."
    )
    evaluate_tokens: int = Field(128, ge=2, description="New tokens per evaluated prompt.")
    log_every: int = Field(10, ge=1, description="Steps averaged in one record of metrics.jsonl.")


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML recipe and apply `section.key=value` overrides (values are YAML).

    Raises ConfigError for an unreadable file, a malformed override or an invalid or unknown key.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, or no day such as 2026-13-45
        raise ConfigError(f"{path} is not valid YAML: {_one_line(error)}.") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of recipe keys.")
    for override in overrides:
        _apply(raw, override)
    try:
        return TrainConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"recipe {path}: {'; '.join(faults(error, TrainConfig))}.") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _apply(raw: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override '{override}' must look like section.key=value.")
    *sections, last = key.split(".")
    node = raw
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override '{override}': {section} is not a section.")
        node = child
    try:
        node[last] = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"override '{override}': the value is not valid YAML.") from error
