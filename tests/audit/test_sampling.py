"""The chi-square test: its numbers are right, fair samples pass and biased ones do not."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dflash.audit.sampling import NUM_BINS, law_test, place_of, survival


@pytest.mark.parametrize("chi_square", [0.0, 3.0, 9.3, 25.0, 80.0])
def test_p_values(chi_square: float) -> None:
    """Guards against a wrong closed form."""
    assert survival(chi_square, NUM_BINS - 1) == pytest.approx(stats.chi2.sf(chi_square, NUM_BINS - 1))


def test_places_of_fair_tokens_are_uniform_and_of_biased_ones_not() -> None:
    """Guards against a transformation that hides a bias towards probable tokens, which is what lenient acceptance
    gives; tied probabilities must not share a place."""
    generator = np.random.default_rng(3)
    probs = np.array([0.3, 0.05, 0.3, 0.25, 0.1], np.float32)
    fair = [place_of(int(generator.choice(5, p=probs / probs.sum())), probs, generator.random()) for _ in range(2000)]
    assert law_test(fair, 2000).passed
    bent = np.array([0.4, 0.03, 0.3, 0.2, 0.07])
    biased = [place_of(int(generator.choice(5, p=bent)), probs, generator.random()) for _ in range(2000)]
    assert not law_test(biased, 2000).passed


def test_pieces_cover_everything_once() -> None:
    """Guards against overlapping or missing pieces of the cumulative distribution."""
    probs = np.array([0.2, 0.4, 0.2, 0.2], np.float32)
    edges = sorted((place_of(token, probs, 0.0), place_of(token, probs, 1 - 1e-9)) for token in range(4))
    assert edges[0][0] == 0
    assert [high for _, high in edges] == pytest.approx([0.4, 0.6, 0.8, 1.0], abs=1e-6)
    assert [low for low, _ in edges] == pytest.approx([0, 0.4, 0.6, 0.8], abs=1e-6)
