"""Do layer states forget rejected rows, and do forwards of different widths give the same bits? Layer by layer.

Every layer's output is recorded, so that a fault is found in the layer where it arises and named by the kind of its
state. Compares sessions (`core/protocols.py`) that were fed the same committed tokens in different ways; arrays are
NumPy, no tensor library is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dflash.audit.oracle import Oracle
from dflash.core.engine import TargetSession
from dflash.core.reference import FloatArray
from dflash.types import Proposal

STEP = 3
"""Rows of the forward that is compared after the rollback."""


class Recorder(Protocol):
    """A target that records every layer's output."""

    layer_kinds: Sequence[str]
    """Kind of each layer's state, in layer order."""
    vocab_size: int

    def session(self) -> TargetSession:
        """A fresh session, in exact mode where it is available."""
        ...

    def layers(self, features: Any) -> FloatArray:
        """Features of a verdict as [rows, layers, width]; float32 holds every narrower number exactly."""
        ...

    def logits(self, logits: Any) -> FloatArray:
        """Logits of a verdict as float32."""
        ...


@dataclass(frozen=True)
class RollbackFault:
    """A layer that remembers what was rejected, or lost what was kept."""

    kept: int
    fed: int
    layer: int
    kind: str
    error: float
    """Largest difference of its outputs from those of a session that was never fed the rejected rows."""


@dataclass(frozen=True)
class RollbackAudit:
    """The rejected-suffix test over all layers."""

    num_cases: int
    kinds: dict[str, int]
    """Kind of state -> number of layers."""
    faults: Sequence[RollbackFault]
    oracle_error: float
    """Largest difference of a logit from the bare model's, over all cases."""
    oracle_tolerance: float

    @property
    def passed(self) -> bool:
        """Whether rejected rows leave no trace and kept ones are all there."""
        return not self.faults and self.oracle_error <= self.oracle_tolerance


def audit_rollback(
    recorder: Recorder,
    oracle: Oracle,
    *,
    prompt_length: int,
    width: int,
    bit_exact: bool,
    tick: Callable[[], None] = lambda: None,
) -> RollbackAudit:
    """Feed blocks of `width` rows of which the first k are kept, two rounds, for several k; then compare one more step
    with a session that was fed the kept rows only.

    Args:
        bit_exact: equality is promised, so every bit counts; else differences of the size of rounding are allowed.
    """
    text = random_text(prompt_length + 2 * width + STEP, recorder.vocab_size, seed=0)
    faults: list[RollbackFault] = []
    error = tolerance = 0.0
    cases = sorted({1, 2, width // 2, width - 1, width} - {0})
    for kept in cases:
        ours, expected = (
            _after_rounds(recorder, text, prompt_length, kept, width if rejects else kept) for rejects in (True, False)
        )
        fed = text[: prompt_length + 2 * kept + STEP]
        rows = oracle.logits(fed, STEP)
        tolerance = max(tolerance, oracle.tolerance(fed, STEP + 2 * kept))
        error = max(error, float(np.abs(ours.logits - rows).max()))
        faults += _layer_faults(recorder, ours.layers, expected.layers, (kept, width), bit_exact)
        tick()
    return RollbackAudit(len(cases), dict(Counter(recorder.layer_kinds)), faults, error, tolerance)


@dataclass(frozen=True)
class _Step:
    logits: FloatArray  # [STEP, V]
    layers: FloatArray  # [STEP, layers, width]


def _after_rounds(recorder: Recorder, text: Sequence[int], prompt_length: int, kept: int, width: int) -> _Step:
    """Two rounds that feed `width` rows and keep `kept` of them, then one step of STEP rows."""
    noise = random_text(width, recorder.vocab_size, seed=1)
    session = recorder.session()
    try:
        session.prefill(text[:prompt_length])
        at = prompt_length
        for _ in range(2):
            block = [*text[at : at + kept], *noise[: width - kept]]
            session.verify(block[0], Proposal(tuple(block[1:])))
            session.commit(range(kept))
            at += kept
        verdict = session.verify(text[at], Proposal(tuple(text[at + 1 : at + STEP])))
        return _Step(recorder.logits(verdict.logits), recorder.layers(verdict.features))
    finally:
        session.close()


def _layer_faults(
    recorder: Recorder, ours: FloatArray, expected: FloatArray, case: tuple[int, int], bit_exact: bool
) -> list[RollbackFault]:
    """The first layer of each kind whose outputs differ, up to and including the first one at all."""
    kept, fed = case
    for layer, kind in enumerate(recorder.layer_kinds):
        error = float(np.abs(ours[:, layer] - expected[:, layer]).max())
        allowed = 0.0 if bit_exact else 1e-4 * float(np.abs(expected[:, layer]).max())
        if error > allowed:
            return [RollbackFault(kept, fed, layer, kind, error)]
    return []


@dataclass(frozen=True)
class WidthAudit:
    """Which forward widths give the same bits."""

    classes: Sequence[tuple[int, ...]]
    """Widths in one class give the same bits for every row of every layer."""
    promised: int | None
    """Least width of exact decoding; None: exactness is not promised here."""
    kinds: dict[str, int]
    num_rows: int
    """Rows compared in the proof."""
    num_equal: int
    """Rows that had the same bits in single steps and in blocks with rejected tails."""
    largest: float
    """Largest difference of a logit in the proof."""
    first_layer: str | None
    """Layer and kind of state where the first difference arose."""

    @property
    def passed(self) -> bool:
        """Whether what is promised holds."""
        return self.promised is None or self.num_equal == self.num_rows


def audit_widths(
    unpadded: Recorder, decoding: Recorder, *, max_width: int, promised: int | None, num_tokens: int = 32
) -> WidthAudit:
    """Find the classes of forwards without padding rows, and prove equality in the form that decodes."""
    classes = _classes(unpadded, max_width)
    text = random_text(24 + num_tokens + max_width, decoding.vocab_size, seed=2)
    single = _single_steps(decoding, text, num_tokens)
    blocks = _blocks(decoding, text, num_tokens, max_width)
    differences = [
        (max(float(np.abs(a.logits - b.logits).max()), 0.0), np.abs(a.layers - b.layers).max(axis=-1))
        for a, b in zip(single, blocks, strict=True)
    ]
    first = None
    for _, by_layer in differences:
        wrong = np.flatnonzero(by_layer)
        if len(wrong):
            first = f"layer {wrong[0]} ({decoding.layer_kinds[wrong[0]]})"
            break
    return WidthAudit(
        classes=classes,
        promised=promised,
        kinds=dict(Counter(decoding.layer_kinds)),
        num_rows=len(differences),
        num_equal=sum(largest == 0 and not by_layer.any() for largest, by_layer in differences),
        largest=max(largest for largest, _ in differences),
        first_layer=first,
    )


def _classes(recorder: Recorder, max_width: int) -> list[tuple[int, ...]]:
    """Widths grouped by the bits of the rows that they share."""
    text = random_text(24 + max_width, recorder.vocab_size, seed=3)
    session = recorder.session()
    try:
        session.prefill(text[:24])
        widths = sorted({*range(1, min(8, max_width) + 1), max_width // 2, max_width - 1, max_width} - {0})
        found: dict[int, _Step] = {}
        for width in widths:
            verdict = session.verify(text[24], Proposal(tuple(text[25 : 24 + width])))
            found[width] = _Step(recorder.logits(verdict.logits), recorder.layers(verdict.features))
    finally:
        session.close()
    classes: list[list[int]] = []
    for width in widths:
        for one in classes:
            if _same_bits(found[one[-1]], found[width]):
                one.append(width)
                break
        else:
            classes.append([width])
    return [tuple(one) for one in classes]


def _same_bits(narrow: _Step, wide: _Step) -> bool:
    rows = len(narrow.logits)
    return bool((narrow.logits == wide.logits[:rows]).all() and (narrow.layers == wide.layers[:rows]).all())


def _single_steps(recorder: Recorder, text: Sequence[int], num_tokens: int) -> list[_Step]:
    session = recorder.session()
    steps = []
    try:
        session.prefill(text[:24])
        for token in text[24 : 24 + num_tokens]:
            verdict = session.verify(token, Proposal())
            steps.append(_Step(recorder.logits(verdict.logits)[0], recorder.layers(verdict.features)[0]))
            session.commit(range(1))
    finally:
        session.close()
    return steps


def _blocks(recorder: Recorder, text: Sequence[int], num_tokens: int, max_width: int) -> list[_Step]:
    """The same tokens in blocks of changing width, each with a rejected tail."""
    noise = random_text(max_width, recorder.vocab_size, seed=4)
    session = recorder.session()
    steps: list[_Step] = []
    try:
        session.prefill(text[:24])
        for index in range(num_tokens):
            if len(steps) == num_tokens:
                break
            kept = min(1 + index % max(1, max_width - 1), num_tokens - len(steps))
            at = 24 + len(steps)
            tail = noise[: (index % 3) * (max_width - kept) // 2]
            block = [*text[at : at + kept], *tail]
            verdict = session.verify(block[0], Proposal(tuple(block[1:])))
            logits, layers = recorder.logits(verdict.logits), recorder.layers(verdict.features)
            steps += [_Step(logits[row], layers[row]) for row in range(kept)]
            session.commit(range(kept))
    finally:
        session.close()
    return steps


def random_text(length: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids without a pattern."""
    ids: list[int] = np.random.default_rng(seed).integers(vocab_size, size=length).tolist()
    return ids
