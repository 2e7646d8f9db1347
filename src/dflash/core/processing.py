"""What logit processing needs besides tensors: which tokens the penalties touch and how often each has occurred before
every row of a verify forward, and what is refused.

Plain counting in NumPy; a backend applies the table to its logits. `core/reference.py` is the specification.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash.errors import ConfigError, ModelError
from dflash.types import Proposal, SamplingParams


def has_penalties(params: SamplingParams) -> bool:
    """Whether any penalty is on."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Raise ConfigError for a logit_bias that cannot be applied to logits of this width."""
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise ConfigError(f"logit_bias names token {token}, but the vocabulary has ids 0 to {vocab_size - 1}.")
        if math.isnan(bias) or bias == math.inf:
            raise ConfigError(f"logit_bias of token {token} must be a number or -inf (ban), not {bias}.")


def require_finite(values: Sequence[float]) -> None:
    """Raise ModelError unless all of these logits (or sums of weights) are numbers."""
    if not all(map(math.isfinite, values)):
        raise ModelError(
            "The target's logits are not finite. If the model runs in float16, load it with dtype float32 or bfloat16; "
            "if logit_bias bans tokens, it must leave at least one."
        )


@dataclass(frozen=True)
class Counts:
    """The tokens that penalties touch in one round, a column each, with one row per verified row."""

    ids: NDArray[np.int64]  # [U]
    counts: NDArray[np.float32]  # [R, U]: occurrences in output + draft tokens before the row
    seen: NDArray[np.bool_]  # [R, U]: occurs in prompt, output or draft tokens before the row


class Penalties:
    """Repetition, presence and frequency penalties along the hypothetical prefix.

    Keeps a column per distinct token (prompt tokens only if the repetition penalty needs them), so that a
    round costs in proportion to the tokens seen, not to the vocabulary.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._column: dict[int, int] = {}
        self._ids = np.empty(0, np.int64)  # [U]
        self._counts = np.empty(0, np.float32)  # [U], occurrences in the output
        if params.repetition_penalty != 1:
            self._add_columns(prompt_ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the output."""
        self._add_columns(tokens)
        for token in tokens:
            self._counts[self._column[token]] += 1

    def counts(self, proposal: Proposal) -> Counts:
        """The table for all rows; each has seen the draft tokens from the anchor down to its own."""
        tokens = proposal.tokens
        fresh = [token for token in dict.fromkeys(tokens) if token not in self._column]
        num_known = len(self._ids)
        column = self._column | {token: num_known + index for index, token in enumerate(fresh)}
        counts = np.zeros((len(tokens) + 1, num_known + len(fresh)), np.float32)
        counts[0, :num_known] = self._counts
        seen = np.zeros(counts.shape, np.bool_)
        seen[0, :num_known] = True
        for index, token in enumerate(tokens):
            parent = index if proposal.parents is None else proposal.parents[index]
            counts[index + 1], seen[index + 1] = counts[parent], seen[parent]
            counts[index + 1, column[token]] += 1
            seen[index + 1, column[token]] = True
        return Counts(np.concatenate([self._ids, np.array(fresh, np.int64)]), counts, seen)

    def _add_columns(self, tokens: Sequence[int]) -> None:
        fresh = [token for token in dict.fromkeys(tokens) if token not in self._column]
        for token in fresh:
            self._column[token] = len(self._column)
        self._ids = np.concatenate([self._ids, np.array(fresh, np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(len(fresh), np.float32)])
