"""Prefixes, paired comparisons and fitted temperatures mean what they say."""

from __future__ import annotations

import numpy as np
import pytest

from dflash.check.measures import THETAS, agreeing_prefix, fit_temperature, overlap, paired


def test_prefixes() -> None:
    """Guards against counting agreement behind the first mismatch, or past the end of the text."""
    assert agreeing_prefix([1, 2, 3], [1, 2, 4, 3]) == 2
    assert agreeing_prefix([2, 1], [1, 2]) == 0
    assert agreeing_prefix([1, 2, 3], [1, 2]) == 2
    assert agreeing_prefix([], [1]) == 0


def test_a_variant_must_beat_luck() -> None:
    """Guards against verdicts from a handful of places, and from gains that are certain but too small to matter."""
    generator = np.random.default_rng(0)
    base = generator.integers(0, 3, 200).tolist()
    assert not paired(base, base).is_better
    assert not paired(base, generator.permutation(base).tolist()).is_better
    assert not paired([0] * 4, [1, 0, 0, 1]).is_better
    assert paired(base, [length + 1 for length in base]).is_better
    assert not paired(base, [length - 1 for length in base]).is_better
    assert not paired([0] * 4000, [1] * 100 + [0] * 3900).is_better
    one = paired([0, 2], [1, 2])
    assert (one.mean, one.gain) == (1.5, 0.5)
    assert [paired([1, 1], [other] * 2).deviations for other in (0, 1, 2)] == [-99, 0, 99], "no infinity in JSON"


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_the_scale_of_the_logits_is_found(scale: float) -> None:
    """Guards against a fit that does not see a missing logit scale: a draft that knows the target's distribution, but
    whose logits are multiplied by `scale`, must be fitted at temperature `scale` and then agree wholly."""
    generator = np.random.default_rng(1)
    overlaps, argmax = [], []
    for _ in range(30):
        logits = (generator.normal(size=50) * 3).astype(np.float32)
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        overlaps.append(overlap(probs, logits * np.float32(scale), None))
        argmax.append(float(probs.max()))
    fit = fit_temperature(overlaps, argmax)
    assert fit is not None
    assert fit.theta == pytest.approx(scale, rel=0.01)
    assert fit.sampled == pytest.approx(1.0, abs=1e-3)
    assert fit.argmax == pytest.approx(np.mean(argmax))
    assert (fit.unscaled < 0.98) == (scale != 1)


def test_a_reduced_vocabulary_overlaps_where_it_has_ids() -> None:
    """Guards against draft logits compared with the wrong target ids."""
    probs = np.array([0.5, 0.1, 0.1, 0.3], np.float32)
    ids = np.array([0, 3])
    row = overlap(probs, np.log(np.array([0.5, 0.5], np.float32)), ids, (1.0,))
    assert row == pytest.approx([0.5 + 0.3])
    assert fit_temperature([], []) is None
    assert 1.0 in [pytest.approx(theta) for theta in THETAS]
