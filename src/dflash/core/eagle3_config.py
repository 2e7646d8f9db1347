"""The resolved description of an EAGLE-3 draft (arXiv:2503.01840): a decoder layer that writes one token after another.

It shares shapes, taps and vocabulary with block drafts and has neither block nor mask: `block_size` counts the rows of
a round, the anchor's and those of the chain. Knows what the numbers mean; how files spell them is `core/dialects/`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash.core.draft_config import (
    MAX_BLOCK_SIZE,
    DraftConfig,
    check_attention_sizes,
    check_taps,
    check_vocabulary,
    write_once,
)
from dflash.core.findings import Finding
from dflash.errors import CheckpointError, PairError

NO_MASK = -1
"""An EAGLE-3 draft has no mask token."""
CHAIN = 7
"""Tokens of a chain where the checkpoint names no number: the steps that SafeAILab's training unrolls."""
NUM_TAPS = 3
"""Taps of a draft that does not list them."""
FUSED_NORMS = ("", "whole", "each")


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Rotary frequencies as Llama 3.1 stretches them: slow pairs by `factor`, fast ones not, in between a ramp."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def llama3_frequencies(theta: float, head_dim: int, scaling: Llama3Rope) -> NDArray[np.float32]:
    """Angle per position of each rotary pair [D / 2]: pairs that turn fewer than `low_freq_factor` times over the
    original context are slowed down by the factor, those that turn more than `high_freq_factor` times are not."""
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clip(0, 1)
    frequencies: NDArray[np.float64] = plain * kept + plain / scaling.factor * (1 - kept)
    return frequencies.astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DraftConfig):
    """An EAGLE-3 draft network.

    `target_layer_ids` is () for checkpoints that do not list their taps: they follow from the target's depth
    (`for_target`).
    """

    head_norms: bool = False
    """Whether queries and keys are normed per head (layers of Qwen3's kind)."""
    norm_before_residual: bool = False
    """Whether the first layer's residual is the normed hidden state instead of the state itself."""
    fused_norm: str = ""
    """Norm on the taps before fc: "" = none, "whole" = over all of them at once, "each" = one per tap."""
    feeds_normed: bool = False
    """Whether the next step is fed the normed output, which the head reads, instead of the output itself."""
    rope_factor: float = 1.0
    """Positions are divided by it (linear scaling)."""
    llama3: Llama3Rope | None = None

    def __post_init__(self) -> None:
        write_once(self)
        check_attention_sizes(self)
        check_vocabulary(self)
        if self.target_layer_ids:
            check_taps(self)
        _check(self)

    @property
    def kind(self) -> str:
        return "eagle3"

    @property
    def has_transitions(self) -> bool:
        return True

    @property
    def fc_in_features(self) -> int:
        return (len(self.target_layer_ids) or NUM_TAPS) * self.tap_width

    def for_target(self, num_layers: int) -> Eagle3Config:
        """With the taps that SafeAILab's code, vLLM and SGLang take where a checkpoint names none: the residuals that
        enter layers 2, n // 2 and n - 3 of n, which are the outputs of the layers before.

        Raises PairError for a target so shallow that these are not three layers.
        """
        if self.target_layer_ids:
            return self
        entered = usual_taps(num_layers)
        if not entered[0] < entered[1] < entered[2]:
            raise PairError(
                f"the EAGLE-3 draft does not list its taps, and the usual ones are no three layers of a target of "
                f"{num_layers}; add eagle_aux_hidden_state_layer_ids to its config.json, or use the draft's own target."
            )
        return dataclasses.replace(self, target_layer_ids=tuple(layer - 1 for layer in entered))


def usual_taps(num_layers: int) -> tuple[int, int, int]:
    """The layers of a target of `num_layers` whose inputs are tapped by habit."""
    return 2, num_layers // 2, num_layers - 3


def tap_findings(config: DraftConfig, num_layers: int) -> list[Finding]:
    """A warning where a list of inputs of layers looks like one of outputs: converters are known to have moved
    SpecForge's and ModelOpt's list (`eagle_config`, outputs) to the top level (inputs) as it was."""
    entered = tuple(tap + 1 for tap in config.target_layer_ids)
    outputs = tuple(layer - 1 for layer in usual_taps(num_layers))
    if not isinstance(config, Eagle3Config) or entered != outputs:
        return []
    return [
        Finding(
            "warning",
            "taps",
            f"the draft names the layers {list(entered)} by what enters them. As outputs of layers these would be the "
            f"usual ones of a target of {num_layers}, so the list may have been converted without adding one; "
            "`dflash check` tells which reading works better.",
        )
    ]


def _check(config: Eagle3Config) -> None:
    if not 2 <= config.block_size <= MAX_BLOCK_SIZE:
        raise CheckpointError(
            f"a chain of {config.block_size - 1} tokens is none that a draft proposes (1 to {MAX_BLOCK_SIZE - 1}); "
            "correct speculative_tokens in the draft's config.json."
        )
    if config.fused_norm not in FUSED_NORMS:
        raise CheckpointError(f"the norm before fc is '{config.fused_norm}', which is none of {FUSED_NORMS[1:]}.")
    if config.target_hidden_size is not None and not (config.owns_embedding and config.owns_head):
        lacking = "lm_head.weight" if config.owns_embedding else "embed_tokens.weight"
        raise CheckpointError(
            f"the draft is {config.hidden_size} wide, its target {config.target_hidden_size}: it cannot borrow the "
            f"target's embedding or head, and the weights lack {lacking}. Export the draft again with it."
        )
    scaled = (config.rope_factor != 1, config.llama3 is not None, config.yarn is not None)
    if sum(scaled) > 1 or not config.rope_factor > 0:
        raise CheckpointError("the draft scales its rotary embedding in two ways, or by no positive factor; keep one.")
