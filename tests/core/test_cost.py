"""Cost curves: the fit against a general solver, what it promises, and the correction by rounds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from scipy.optimize import nnls

from dflash.core.cost import REFIT_EVERY, CostCurve, CostTracker, convex_fit, nonnegative_least_squares


def test_nonnegative_least_squares_equals_scipy() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        a, b = rng.normal(size=(9, 6)), rng.normal(size=9) + 0.5
        expected, residual = nnls(a, b)
        ours = nonnegative_least_squares(a, b)
        assert (ours >= 0).all()
        np.testing.assert_allclose(np.linalg.norm(a @ ours - b), residual, rtol=1e-8)
        np.testing.assert_allclose(ours, expected, atol=1e-7)


def test_fit_is_monotone_convex_and_keeps_what_already_is() -> None:
    """Fault: a kink or a dip, with which the rule would stop too early or never."""
    x = [1, 2, 3, 5, 8, 16, 32]
    convex = [20.0, 20.0, 20.5, 22.0, 26.0, 40.0, 80.0]
    np.testing.assert_allclose(convex_fit(x, convex), convex, rtol=1e-9)
    rng = np.random.default_rng(1)
    for _ in range(30):
        y = np.array(convex) * rng.lognormal(0, 0.2, size=len(x))
        slopes = np.diff(convex_fit(x, y)) / np.diff(x)
        assert (slopes >= -1e-12).all()
        assert (np.diff(slopes) >= -1e-9).all()


def test_the_least_time_of_a_cell_counts() -> None:
    """Fault: another process's time becomes part of the curve."""
    quiet = CostCurve.fit({(0, 1): [1.0], (0, 4): [1.3], (0, 8): [2.0]})
    busy = CostCurve.fit({(0, 1): [9.0, 1.0, 4.0], (0, 4): [1.3, 7.0], (0, 8): [5.0, 2.0]})
    assert quiet == busy
    assert [quiet.at(rows, 0) for rows in (1, 4, 6, 8, 16)] == pytest.approx([1.0, 1.3, 1.65, 2.0, 3.4])


def test_depth_is_interpolated_and_goes_on() -> None:
    """Fault: a curve measured over short contexts serves long ones (width 8 costs far more there)."""
    often = CostCurve.fit({(0, 1): [1.0, *[1.2] * 5, 9.0], (0, 8): [2.4] * 7})
    assert [often.at(1, 0), often.at(8, 0)] == pytest.approx([1.2, 2.4])  # many: what rounds will take
    curve = CostCurve.fit({(0, 1): [1.0], (0, 8): [2.0], (1000, 1): [1.1], (1000, 8): [4.0]})
    assert curve.at(8, 500) == pytest.approx(3.0)
    assert curve.at(8, 3000) == pytest.approx(8.0)
    assert curve.at(1, 3000) == pytest.approx(1.3)
    again = CostCurve.fit({(0, 1): [1.0], (0, 8): [2.0], (1000, 1): [0.9], (1000, 8): [1.5]})
    assert again.at(8, 1000) == pytest.approx(2.0)  # deeper is never cheaper


def test_json_round_trip_and_damage() -> None:
    curve = CostCurve.fit({(0, 1): [1.0], (0, 8): [2.0]})
    assert CostCurve.from_json(json.loads(json.dumps(curve.to_json()))) == curve
    good = curve.to_json()
    damaged: list[dict[str, Any]] = [
        {"rows": [1]},
        {"rows": [8, 1]},
        {"seconds": [[1.0, float("nan")]]},
        {"depths": []},
    ]
    for wrong in damaged:
        with pytest.raises((ValueError, KeyError, TypeError)):
            CostCurve.from_json({**good, **wrong})


@pytest.mark.parametrize("start", [None, CostCurve.fit({(0, 1): [50.0], (0, 8): [50.5]})])
def test_rounds_correct_a_wrong_curve(start: CostCurve | None) -> None:
    """Fault: a curve measured on a busy machine, or none at all, decides for ever. Every ninth round is disturbed."""
    tracker = CostTracker(start)
    rng = np.random.default_rng(2)
    for step in range(12 * REFIT_EVERY):
        rows = (1, 2, 4, 8)[step % 4]
        noise = 10.0 if step % 9 == 0 else float(rng.lognormal(0, 0.05))
        tracker.saw_verify(rows, 100, (1 + 0.5 * (rows - 1)) * noise)
    costs = [tracker.verify(rows, 100) for rows in (1, 2, 4, 8)]
    np.testing.assert_allclose(costs, [1.0, 1.5, 2.5, 4.5], rtol=0.12)
    line = tracker.line(100, 8)
    assert line[7] == pytest.approx(tracker.verify(8, 128))
    assert len(line) == 8


def test_draft_time_follows_its_median() -> None:
    tracker = CostTracker(CostCurve.guess(1.0), CostCurve((1,), (0,), ((0.2,),)))
    assert tracker.draft(0) == 0.2
    for seconds in (0.4, 0.4, 9.0, 0.4):
        tracker.saw_draft(0, seconds)
    assert tracker.draft(0) == pytest.approx(0.4)
    assert CostTracker().draft(0) == pytest.approx(0.25)


def test_a_slower_machine_makes_drafts_no_dearer_than_steps() -> None:
    """Fault: drafts are known by their latest times and steps by an old measurement, so that on a machine that other
    programs keep busy a draft seems to cost three times as much, and is no longer asked."""
    tracker = CostTracker(CostCurve((1, 8), (0,), ((1.0, 1.7),)), CostCurve((1,), (0,), ((0.2,),)))
    for number in range(40):
        tracker.saw_draft(10, 0.6)
        tracker.saw_verify(1 + number % 4, 10, 3 * (1 + 0.1 * (number % 4)))
        if number >= 3:
            assert tracker.draft(10) / tracker.verify(1, 10) == pytest.approx(0.2, rel=0.05)
