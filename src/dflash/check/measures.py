"""What the probe's guesses mean: prefixes that agree, paired comparisons, and the temperature that fits a draft. NumPy.

Every variant of a draft (another reading of its anchor, other taps) guesses at the same places of the same texts, so
variants are compared place by place: a difference that luck explains is no finding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash.core.reference import FloatArray

DEVIATIONS = 3.0
"""Standard errors by which a variant must be better before it is believed (one of 700 by luck alone)."""
MOST_DEVIATIONS = 99.0
LEAST_GAIN = 0.05
"""Tokens per guess that it must gain on top of that."""
THETAS = tuple(float(theta) for theta in np.geomspace(1 / 8, 8, 25))
"""Draft temperatures tried, a factor of 2^(1/4) apart."""


def agreeing_prefix(guess: Sequence[int], text: Sequence[int]) -> int:
    """How many of the guessed tokens the target says, up to the first that it does not (or the text's end)."""
    length = 0
    while length < min(len(guess), len(text)) and guess[length] == text[length]:
        length += 1
    return length


@dataclass(frozen=True)
class Paired:
    """A variant against the draft as it is configured, over the same places."""

    mean: float
    """Tokens of the variant's guesses that agree, per place."""
    gain: float
    """By how much that is more than the configured draft's."""
    deviations: float
    """The gain in standard errors of the paired differences."""

    @property
    def is_better(self) -> bool:
        """Whether the variant is better than luck explains."""
        return self.deviations > DEVIATIONS and self.gain > LEAST_GAIN


def paired(configured: Sequence[int], variant: Sequence[int]) -> Paired:
    """Compare two lists of agreeing prefixes, place by place (at least one place)."""
    differences = np.asarray(variant, np.float64) - np.asarray(configured, np.float64)
    gain = float(differences.mean())
    error = float(differences.std()) / len(differences) ** 0.5
    # Without any spread the gain is as certain as it can be; infinity would be no JSON.
    deviations = gain / error if error else MOST_DEVIATIONS * float(np.sign(gain))
    return Paired(float(np.mean(variant)), gain, float(np.clip(deviations, -MOST_DEVIATIONS, MOST_DEVIATIONS)))


def overlap(
    target_probs: FloatArray,  # [V], what the target says at temperature 1
    draft_logits: FloatArray,  # [K]
    token_ids: NDArray[np.int64] | None,  # [K], target id of each draft logit; None = 0..V-1
    thetas: Sequence[float] = THETAS,
) -> FloatArray:
    """Acceptance of one slot if the draft samples at temperature θ: the sum of min(p, q_θ), for each θ [thetas]."""
    p = target_probs if token_ids is None else target_probs[token_ids]
    shifted = draft_logits.astype(np.float64) - float(draft_logits.max())
    result = np.empty(len(thetas), np.float32)
    for index, theta in enumerate(thetas):
        q = np.exp(shifted / theta)
        result[index] = np.minimum(p, q / q.sum()).sum()
    return result


@dataclass(frozen=True)
class TemperatureFit:
    """How a draft's probabilities compare with the target's, over slots that verification would have reached."""

    theta: float
    """The draft temperature at which sampling from the draft would be accepted most; far from 1 = its logits are scaled
    wrongly, which greedy guesses do not show."""
    sampled: float
    """Acceptance per slot at that temperature, the target at temperature 1."""
    unscaled: float
    """Acceptance per slot at θ = 1."""
    argmax: float
    """Acceptance per slot of the arg max, p(argmax q): what this package proposes."""
    num_slots: int


def fit_temperature(
    overlaps: Sequence[FloatArray], argmax_probs: Sequence[float], thetas: Sequence[float] = THETAS
) -> TemperatureFit | None:
    """The best θ for slots with these `overlap` rows; None without a slot. `argmax_probs` [slots]: p(argmax q)."""
    if not overlaps:
        return None
    means = np.mean(np.stack(overlaps), axis=0)
    # Of several that are equally good the one nearest to 1: flat optima are common.
    good = [theta for theta, mean in zip(thetas, means, strict=True) if mean >= means.max() - 1e-3]
    theta = min(good, key=lambda one: abs(np.log(one)))
    one = min(range(len(thetas)), key=lambda index: abs(np.log(thetas[index])))
    return TemperatureFit(
        theta=theta,
        sampled=float(means[list(thetas).index(theta)]),
        unscaled=float(means[one]),
        argmax=float(np.mean(argmax_probs)),
        num_slots=len(overlaps),
    )
