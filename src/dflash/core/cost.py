"""What a forward costs: seconds of verification by width and context depth, and of drafting by depth.

A curve is fitted to measured times as the monotone convex function nearest to them by least squares (arXiv:2606.01813
needs convexity for its stopping rule; kernels are not exactly convex, timings never). Between measured depths it is
linear. A tracker corrects a curve by the rounds that really ran: each width's median against the curve, so that a
measurement on a busy machine, another process or a longer context heals itself. Knows numbers only; measuring is the
backend's business. A wrong curve makes decoding slower, never different.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.types import Round

DRAFT_WORD = "draft"
"""Part of a round's `reason` if the draft was asked in it."""
RECENT = 15
"""Rounds per width whose median corrects the curve."""
REFIT_EVERY = 16
"""Rounds between two corrections."""
MANY = 7
"""Times whose median is trusted."""
LEAST_SECONDS = 1e-9
"""Nothing is free: times are divided by."""
LINE_STEP = 128
"""Depths that costs are looked up at."""
PRIOR_WEIGHT = 4.0
"""Rounds that the measured curve weighs as much as, at each of its widths."""

PLAIN_WEIGHT = 100.0
"""Times another width's weight that a plain step has in a fit: all that is decided is decided against it."""


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a verify forward, for rows (anchor included) and depths (committed tokens) in ascending order."""

    rows: tuple[int, ...]
    depths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    """[depth][rows]"""

    @classmethod
    def fit(cls, measured: Mapping[tuple[int, int], Sequence[float]]) -> CostCurve:
        """From times of (depth, rows), every depth measured at the same rows; of each cell its `typical` time."""
        depths = tuple(sorted({depth for depth, _ in measured}))
        rows = tuple(sorted({width for _, width in measured}))
        table = np.array([[typical(measured[depth, width]) for width in rows] for depth in depths])
        weights = [PLAIN_WEIGHT if width == 1 else 1.0 for width in rows]
        fitted = np.array([convex_fit(rows, times, weights) for times in table])
        fitted = np.maximum.accumulate(fitted, axis=0)  # deeper is never cheaper
        return cls(rows, depths, tuple(tuple(float(value) for value in line) for line in fitted))

    @classmethod
    def guess(cls, seconds: float = 1.0, per_row: float = 0.1) -> CostCurve:
        """Where nothing was measured: a plain step's time and the same share of it for each further row."""
        return cls((1, 2), (0,), ((seconds, seconds * (1 + per_row)),))

    def at(self, rows: int, depth: int) -> float:
        """Seconds of a forward of `rows` rows behind `depth` tokens; beyond what was measured the last slope holds."""
        lines = [_interpolate(self.rows, line, rows) for line in self.seconds]
        return max(_interpolate(self.depths, lines, depth), 0.0)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"rows": list(self.rows), "depths": list(self.depths), "seconds": [list(line) for line in self.seconds]}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> CostCurve:
        """The inverse of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        rows, depths = tuple(int(value) for value in raw["rows"]), tuple(int(value) for value in raw["depths"])
        seconds = tuple(tuple(float(value) for value in line) for line in raw["seconds"])
        shapes = len(seconds) == len(depths) > 0 and all(len(line) == len(rows) > 0 for line in seconds)
        if not shapes or list(rows) != sorted(set(rows)) or list(depths) != sorted(set(depths)):
            raise ValueError("rows, depths and seconds do not belong together")
        if not all(np.isfinite(value) and value > 0 for line in seconds for value in line):
            raise ValueError("seconds must be positive")
        return cls(rows, depths, seconds)


def typical(times: Sequence[float]) -> float:
    """The time to expect: the median of many, the least of a few, of which one disturbance could make up half."""
    return median(times) if len(times) >= MANY else min(times)


def convex_fit(
    x: Sequence[float],  # [n], ascending
    y: Sequence[float] | NDArray[np.float64],  # [n], positive
    weights: Sequence[float] | None = None,  # [n]
) -> NDArray[np.float64]:
    """The non-decreasing convex function nearest to y at the points x, by weighted least squares, [n].

    Such a function is c + sum_k a_k max(0, x - x_k) with c, a_k >= 0: a non-negative least-squares problem.
    """
    points = np.asarray(x, np.float64)
    root = np.sqrt(np.ones_like(points) if weights is None else np.asarray(weights, np.float64))
    hinges = np.maximum(0.0, points[:, None] - points[None, :-1])
    basis = np.concatenate([np.ones((len(points), 1)), hinges], axis=1)
    found = nonnegative_least_squares(basis * root[:, None], np.asarray(y, np.float64) * root)
    result: NDArray[np.float64] = basis @ found
    return result


def nonnegative_least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """argmin |a x - b| over x >= 0 for a small dense `a` [m, n], by the active-set method of Lawson and Hanson."""
    num = a.shape[1]
    x, free = np.zeros(num), np.zeros(num, np.bool_)
    tolerance = 1e-10 * max(1.0, float(np.abs(a.T @ b).max()))
    for _ in range(10 * num):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while True:
            trial = np.zeros(num)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if (trial[free] > 0).all():
                break
            falling = free & (trial <= 0)
            step = (x[falling] / (x[falling] - trial[falling])).min() if falling.any() else 0.0
            x = x + step * (trial - x)
            free &= x > 1e-14
            x[~free] = 0
            if not free.any():
                return x
        x = trial
    return x


def _interpolate(points: Sequence[int], values: Sequence[float], at: float) -> float:
    """Piecewise linear through (points, values); the last slope goes on above, the first value below."""
    if len(points) == 1 or at <= points[0]:
        return values[0]
    upper = min(bisect_right(points, at), len(points) - 1)
    lower = upper - 1
    slope = (values[upper] - values[lower]) / (points[upper] - points[lower])
    return values[lower] + slope * (at - points[lower])


class CostTracker:
    """A curve that follows the rounds of the running process, for verification and for drafting."""

    def __init__(self, verify: CostCurve | None = None, draft: CostCurve | None = None) -> None:
        """`draft`: one row; seconds of a draft forward by depth. None: nothing measured, rounds will tell."""
        self._known = verify is not None
        self._verify = verify or CostCurve.guess()
        self._draft = draft
        self._recent: dict[int, deque[float]] = {}  # rows -> observed / curve
        self._recent_draft: deque[float] = deque(maxlen=RECENT)
        self._pace: deque[float] = deque(maxlen=RECENT)  # observed / corrected curve, since it was corrected last
        self._num_seen = 0
        self._lines: dict[tuple[int, int], list[float]] = {}
        self._correction = CostCurve((1,), (0,), ((1.0,),))  # factor by rows

    def verify(self, rows: int, depth: int) -> float:
        """Seconds of a verify forward and of accepting and keeping its rows."""
        return max(self._verify.at(rows, depth) * self._correction.at(rows, 0), LEAST_SECONDS)

    def steps(self, rows: int, depth: int) -> float:
        """A verify forward in plain steps, for the books: what was seen of both in this process, not smoothed to a
        convex curve as `verify`, by which widths are chosen."""
        smooth = self.verify(rows, depth) / self.verify(1, depth)
        seen, plain = self._recent.get(rows), self._recent.get(1)
        if not seen or not plain:
            return smooth
        raw = max(self._verify.at(rows, depth), LEAST_SECONDS) / max(self._verify.at(1, depth), LEAST_SECONDS)
        return raw * median(seen) / median(plain)

    def line(self, depth: int, max_rows: int) -> Sequence[float]:
        """`verify` of 1..max_rows rows, at a depth rounded to the nearest of those that `LINE_STEP` divides."""
        step = (depth + LINE_STEP // 2) // LINE_STEP
        line = self._lines.get((step, max_rows))
        if line is None:
            line = [self.verify(rows, step * LINE_STEP) for rows in range(1, max_rows + 1)]
            self._lines[step, max_rows] = line
        return line

    def draft(self, depth: int) -> float:
        """Seconds of a draft forward, on the scale of `verify`; a quarter of a plain step while nothing is known."""
        base = self.verify(1, depth) / 4 if self._draft is None else self._draft.at(1, depth)
        if len(self._recent_draft) < 3:
            return base
        # A machine that is slower than when the curve was measured is so for both: only their ratio decides.
        return median(self._recent_draft) / (median(self._pace) if len(self._pace) >= 3 else 1.0)

    def saw_verify(self, rows: int, depth: int, seconds: float) -> None:
        """A round of `rows` rows took `seconds` from the proposal to its last row being kept."""
        seconds = max(seconds, LEAST_SECONDS)  # clocks may stand still or be set back
        if not self._known:  # the first round gives the guess its scale
            self._verify, self._known = CostCurve.guess(seconds / (1 + 0.1 * (rows - 1))), True
            self._lines.clear()
        if rows not in self._recent:
            self._recent[rows] = deque(maxlen=RECENT)
        self._recent[rows].append(seconds / max(self._verify.at(rows, depth), LEAST_SECONDS))
        self._pace.append(seconds / self.verify(rows, depth))
        self._num_seen += 1
        if self._num_seen % REFIT_EVERY == 0:
            self._refit()

    def saw_draft(self, depth: int, seconds: float) -> None:
        """A draft forward (with the context rows that had waited for it) took `seconds`."""
        self._recent_draft.append(max(seconds, LEAST_SECONDS))

    def _refit(self) -> None:
        """Correct the curve: a convex fit through its own points, scaled as a whole, and this process's medians."""
        medians = {rows: median(ratios) for rows, ratios in self._recent.items() if len(ratios) >= 3}
        if not medians:
            return
        scale = median(medians.values())
        points = sorted({*self._verify.rows, *medians})
        reference = self._verify.depths[0]
        base = [max(self._verify.at(rows, reference), LEAST_SECONDS) for rows in points]
        factors = [medians.get(rows, scale) for rows in points]
        weights = [PRIOR_WEIGHT + len(self._recent.get(rows, ())) for rows in points]
        weights[0] *= PLAIN_WEIGHT if points[0] == 1 else 1.0
        fitted = convex_fit(points, [time * factor for time, factor in zip(base, factors, strict=True)], weights)
        ratios = tuple(float(time) / value for time, value in zip(fitted, base, strict=True))
        self._lines.clear()
        self._pace.clear()
        # Beyond the last point the factor stays: a slope of ratios has no meaning there.
        self._correction = CostCurve((*points, points[-1] + 1), (0,), ((*ratios, ratios[-1]),))


def predicted_seconds(
    rounds: Sequence[Round],
    num_prompt_tokens: int,
    verify: CostCurve,
    draft: CostCurve | None = None,
    *,
    always_drafts: bool = False,
) -> float:
    """What the curves say that decoding rounds (the prefill left out) take: `Round` says what each of them fed, and
    whether the draft was asked, unless it is in every round that feeds something (`always_drafts`)."""
    depth, seconds = num_prompt_tokens, 0.0
    for step in rounds:
        seconds += verify.at(1 + step.num_proposed, depth)
        asked = step.num_proposed > 0 if always_drafts else DRAFT_WORD in step.reason
        if draft is not None and asked:
            seconds += draft.at(1, depth)
        depth += len(step.tokens)
    return seconds
