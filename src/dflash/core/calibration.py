"""Measure what forwards cost here, and remember it: seconds of verification by rows and depth, and of a draft.

A quick measurement at load takes about a second and is kept in the cache, per machine, device, dtype, threads, target
and draft; `dflash calibrate` takes longer and replaces it. Every width is timed in turn, several times over; of a few
times the least counts, since whatever disturbs a measurement only adds to it, of many the median, which is what rounds
will take. What is still wrong is corrected by the rounds themselves (`core/cost.py`). Never fails: without a cache it
is measured anew.

Knows sessions and files; how to wait for a device, and what makes two machines different, is said by a backend's
`calibration.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dflash import __version__
from dflash.cache import cache_root, prune, touch
from dflash.core.adaptive import as_asker
from dflash.core.cost import CostCurve, CostTracker, typical
from dflash.core.drafting import CopyDrafter, SharedDrafter
from dflash.core.engine import SharedTarget, TargetSession
from dflash.core.engine_info import EngineInfo
from dflash.core.protocols import Drafter
from dflash.types import Clock, Proposal

ROWS = (1, 2, 4, 8, 16, 32, 64)
SHALLOW, DEEP = 64, 2048
"""Depths of the measurement, in tokens; the deep one only where forwards may attend to unused keys (exact mode)."""
QUICK_SECONDS = 1.2
"""Time after which a quick measurement starts no further sweep."""
LEAST_SWEEPS = 2
"""Sweeps that are made whatever they take, unless warming up already took longer than SLOW_SECONDS."""
SLOW_SECONDS = 6.0
"""Then the times of warming up are taken: noise of milliseconds does not matter among forwards of seconds."""

KERNELS = 3
"""Raised whenever forwards of the same pair take another time than before: costs that were kept then are void."""
MOST_KEPT, DAYS_KEPT = 64, 90
"""Measurements that the cache keeps: of the pairs used last, and not longer unused than so many days."""

Curves = tuple[CostCurve, CostCurve | None]
"""Of verification; of drafting, if there is a draft."""


@dataclass(frozen=True)
class Device:
    """Where forwards run, as a backend says it."""

    facts: Mapping[str, Any]
    """What costs depend on besides `EngineInfo`: the library's version, the name of the device."""
    wait: Callable[[], object] = lambda: None
    """Blocks until everything that was handed to the device is done."""


def load_costs(
    target: SharedTarget, drafter: SharedDrafter, info: EngineInfo, device: Device, *, max_rows: int
) -> CostTracker:
    """The costs of this pair on this machine: from the cache, else measured quickly and kept there."""
    path = costs_path(info, device, max_rows)
    curves = _read(path)
    if curves is None:
        curves = measure(target, drafter, device, exact=info.exact, max_rows=max_rows, seconds=QUICK_SECONDS).curves()
        write_costs(path, *curves)
    return CostTracker(*curves)


def costs_path(info: EngineInfo, device: Device, max_rows: int) -> Path:
    """The file that keeps the costs of this pair on this machine."""
    return cache_root() / "costs" / f"{_identity(info, device, max_rows)}.json"


@dataclass(frozen=True)
class Times:
    """Seconds that forwards of a pair took. Times of several measurements may be added."""

    verify: Mapping[tuple[int, int], Sequence[float]]
    """Of (depth, rows), all at one depth."""
    late: Mapping[int, Sequence[float]]
    """Of the narrowest and the widest forward over `DEEP` keys; empty where none was timed."""
    draft: Sequence[float] | None
    """None without a draft."""
    depth: int
    """Of all but `late`."""

    def __add__(self, other: Times) -> Times:
        """Both measurements of one pair."""
        return Times(
            _joined(self.verify, other.verify),
            _joined(self.late, other.late),
            None if self.draft is None or other.draft is None else [*self.draft, *other.draft],
            self.depth,
        )

    def curves(self) -> Curves:
        """What forwards are expected to take."""
        verify = dict(self.verify)
        if self.late:
            first, last = min(self.late), max(self.late)
            # Attention's share grows linearly in rows, so that two widths tell the others.
            extra = [
                max(typical(self.late[width]) - typical(verify[self.depth, width]), 0.0) for width in (first, last)
            ]
            slope = (extra[1] - extra[0]) / max(last - first, 1)
            for depth, width in list(verify):
                seconds = typical(verify[depth, width]) + max(extra[0] + slope * (width - first), 0.0)
                verify[DEEP, width] = [seconds]
        draft = None if self.draft is None else CostCurve((1,), (self.depth,), ((typical(self.draft),),))
        return CostCurve.fit(verify), draft


_Cell = TypeVar("_Cell")


def _joined(
    one: Mapping[_Cell, Sequence[float]], other: Mapping[_Cell, Sequence[float]]
) -> dict[_Cell, Sequence[float]]:
    return {cell: [*one.get(cell, ()), *other.get(cell, ())] for cell in {**one, **other}}


def measure(
    target: SharedTarget,
    drafter: SharedDrafter | None,
    device: Device,
    *,
    exact: bool,
    max_rows: int,
    seconds: float = QUICK_SECONDS,
    clock: Clock = time.perf_counter,
) -> Times:
    """Time verify forwards and drafts of this pair.

    Args:
        exact: forwards of the bit-exact form.
        max_rows: widest forward to time.
        seconds: no further sweep over all widths starts after this time; at least two are made.
    """

    def timed(work: Callable[[], object]) -> float:
        """Seconds of `work`, finished also on a device."""
        device.wait()
        started = clock()
        work()
        device.wait()
        return clock() - started

    has_model = drafter is not None and not isinstance(drafter, CopyDrafter)
    session = target.session(exact=exact, features=has_model)
    try:
        prompt = [index * 37 % target.vocab_size for index in range(min(SHALLOW, target.max_length // 2))]
        verdict = session.prefill(prompt)
        rows = [width for width in ROWS if width <= min(max_rows, target.max_length - len(prompt))]
        draft: list[float] | None = None
        if drafter is not None and has_model:
            draft = _drafting(drafter.session(), session, prompt, verdict.features, timed, seconds=seconds, clock=clock)
        deep = exact and target.max_length > DEEP + rows[-1]
        verify, late = _verification(session, rows, target.vocab_size, timed, deep=deep, seconds=seconds, clock=clock)
        return Times(verify, late, draft, session.num_tokens)
    finally:
        session.close()


def _drafting(
    drafting: Drafter,
    session: TargetSession,
    prompt: list[int],
    features: Any,
    timed: Callable[[Callable[[], object]], float],
    *,
    seconds: float,
    clock: Clock,
) -> list[float]:
    """Times of a draft forward, each behind a verify forward: that is how it runs, with its weights gone from the
    caches."""
    drafting.observe(prompt, features)
    work = _draft_round(drafting, prompt[0], features)
    times = [timed(work)]  # the first one packs and allocates
    if timed(lambda: session.verify(1, Proposal())) < SLOW_SECONDS / 8:
        times.clear()
    started = clock()
    while len(times) < LEAST_SWEEPS or clock() - started < seconds / 4:
        session.verify(1, Proposal())
        times.append(timed(work))
    return times


def _draft_round(drafting: Drafter, token: int, features: Any) -> Callable[[], object]:
    """What a draft does in a round: take in the token of the round before, then guess."""
    ask = as_asker(drafting)
    row = None if features is None else features[:1]

    def work() -> object:
        drafting.observe([token], row)
        return ask(token, drafting.max_proposal, 2)

    return work


def _verification(
    session: TargetSession,
    rows: list[int],
    vocab_size: int,
    timed: Callable[[Callable[[], object]], float],
    *,
    deep: bool,
    seconds: float,
    clock: Clock,
) -> tuple[dict[tuple[int, int], list[float]], dict[int, list[float]]]:
    """Times by (depth, rows), and those over `DEEP` keys by rows."""
    depth = session.num_tokens

    def forward(width: int) -> Callable[[], object]:
        # Different tokens: of equal ones, all rows would choose the same experts.
        tokens = tuple(index * 53 % vocab_size for index in range(1, width))
        return lambda: session.verify(1, Proposal(tokens)).logits[:, 0].tolist()

    started, sweeps = clock(), 0
    # The first forwards pack weights and make buffers and masks.
    times: dict[tuple[int, int], list[float]] = {(depth, width): [timed(forward(width))] for width in rows}
    if clock() - started > SLOW_SECONDS:
        return times, {}
    times = {place: [] for place in times}
    started = clock()
    while sweeps < LEAST_SWEEPS or clock() - started < seconds:
        for width in rows:
            times[depth, width].append(timed(forward(width)))
        sweeps += 1
    late: dict[int, list[float]] = {}
    if deep:
        session.return_at_least(DEEP)
        for width in (rows[0], rows[-1]):
            forward(width)()
            late[width] = [timed(forward(width)) for _ in range(LEAST_SWEEPS)]
    return times, late


def _identity(info: EngineInfo, device: Device, max_rows: int) -> str:
    """Everything that costs depend on, as a short hash."""
    parts: Mapping[str, Any] = {
        "version": __version__,
        "kernels": [KERNELS, info.packs_single],
        **device.facts,
        "machine": [platform.node(), platform.machine(), os.cpu_count()],
        "threads": info.num_threads,
        "dtype": info.dtype,
        "target": [info.target, info.target_revision],
        "draft": [info.draft, info.draft_sha256],
        "exact": [info.exact, info.exactness.width if info.exactness else 0],
        "rows": max_rows,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _read(path: Path) -> Curves | None:
    """The curves in a file; None if there is none or it is damaged."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        draft = raw["draft"]
        touch(path)
        return CostCurve.from_json(raw["verify"]), None if draft is None else CostCurve.from_json(draft)
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def write_costs(path: Path, verify: CostCurve, draft: CostCurve | None) -> None:
    """Keep the curves, whole or not at all, in the place of those that were not used for long; a cache that cannot be
    written is no error."""
    text = json.dumps({"verify": verify.to_json(), "draft": None if draft is None else draft.to_json()})
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)
        prune(path.parent, most=MOST_KEPT, days=DAYS_KEPT, keep=path)
