"""Keyed draws: pure, independent, uniform, and frozen."""

from __future__ import annotations

import numpy as np
from scipy import stats

from dflash.core.draws import uniform, uniforms


def test_a_draw_depends_on_seed_and_position_only() -> None:
    """Guards against a stream that runs on: the value must not depend on what was drawn before."""
    row = uniforms(7, 100, 16)
    assert [uniform(7, 100 + index) for index in range(16)] == row.tolist()
    assert uniforms(7, 108, 4).tolist() == row[8:12].tolist()
    assert uniform(8, 100) != row[0]


def test_values_are_frozen() -> None:
    """Guards against a silent change of every sampled text (another key layout, another NumPy)."""
    assert uniforms(0, 0, 2).tolist() == [0.011546754286331562, 0.5023796042735054]
    assert uniform(2**63 - 1, 2**40) == 0.37638615923026186


def test_draws_are_uniform_along_positions_and_seeds() -> None:
    """Kolmogorov-Smirnov at p > 1e-3 for fixed data, and no correlation between neighbours."""
    by_position = uniforms(3, 0, 20_000)
    by_seed = np.array([uniform(seed, 5) for seed in range(2_000)])
    for sample in (by_position, by_seed):
        assert sample.min() >= 0
        assert sample.max() < 1
        assert stats.kstest(sample, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(by_position[1:], by_position[:-1])[0, 1]) < 0.03
