"""The rejected-suffix test passes every kind of layer state, and names the kind in which a fault is injected.

The faults are those of the field: a recurrent state that keeps rejected rows (what a library's crop leaves behind),
a convolution window that is one row off, keys of the wrong row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from dflash.audit.oracle import open_oracle
from dflash.audit.recorder import LayerRecorder
from dflash.audit.states import RollbackAudit, audit_rollback
from dflash.backends.torch.states.full import FullKeyValueState
from dflash.backends.torch.states.recurrent import RecurrentState
from dflash.backends.torch.states.sliding import SlidingKeyValueState
from tests.audit.subjects import plain_engine_of
from tests.backends.architectures import WINDOW, model_of

Break = Callable[[pytest.MonkeyPatch], None]
WIDTH = 5


def wrong_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last kept row's keys and values are those of the row behind it, in every layer that sees everything."""
    commit = FullKeyValueState.commit

    def broken(self: FullKeyValueState, path: Sequence[int]) -> None:
        commit(self, path)
        _take_the_next(self, path, 0)

    monkeypatch.setattr(FullKeyValueState, "commit", broken)


def wrong_keys_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in layers with a window."""
    commit = SlidingKeyValueState.commit

    def broken(self: SlidingKeyValueState, path: Sequence[int]) -> None:
        commit(self, path)
        _take_the_next(self, path, self._base)

    monkeypatch.setattr(SlidingKeyValueState, "commit", broken)


def _take_the_next(state: FullKeyValueState, path: Sequence[int], base: int) -> None:
    if state.keys is None or state.values is None or not 0 < len(path) < state.span.num_rows:
        return
    last = state.span.start - base + len(path) - 1
    for stored in (state.keys, state.values):
        stored[:, :, last] = stored[:, :, last + 1]


def rejected_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Transformers' own crop does: the recurrent state has seen all rows."""
    _commit_more(monkeypatch, lambda num_kept, num_fed: num_fed)


def window_one_row_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution window that ends one row too late."""
    _commit_more(monkeypatch, lambda num_kept, num_fed: min(num_kept + 1, num_fed))


def _commit_more(monkeypatch: pytest.MonkeyPatch, num_rows: Callable[[int, int], int]) -> None:
    commit = RecurrentState.commit

    def broken(self: RecurrentState, path: Sequence[int]) -> None:
        commit(self, range(num_rows(len(path), len(self._after_row))) if self._after_row and path else path)

    monkeypatch.setattr(RecurrentState, "commit", broken)


CASES: dict[str, tuple[Break, str]] = {
    "Llama": (wrong_keys, "DynamicLayer"),
    "Mistral": (wrong_keys_in_windows, "DynamicSlidingWindowLayer"),
    "DeepSeek-V3, Kimi-K2": (wrong_keys, "DynamicLayer"),
    "GLM-MoE-DSA": (wrong_keys, "DynamicIndexedLayer"),
    "Qwen3.5": (rejected_rows_stay, "LinearAttentionLayer"),
    "LFM2": (window_one_row_late, "LinearAttentionLayer"),
    "Granite 4": (rejected_rows_stay, "LinearAttentionLayer"),
}


def audited(family: str) -> RollbackAudit:
    engine = plain_engine_of(model_of(family))
    recorder = LayerRecorder(engine, exact=True)
    try:
        return audit_rollback(
            recorder, open_oracle(engine), prompt_length=2 * WINDOW + 3, width=WIDTH, bit_exact=engine.info.exact
        )
    finally:
        recorder.close()
        engine.close()


@pytest.mark.parametrize("family", CASES)
def test_every_kind_passes_and_a_fault_in_it_is_named(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against false alarms on states that are right, and against faults that pass for rounding."""
    clean = audited(family)
    assert clean.passed, (clean.faults, clean.oracle_error, clean.oracle_tolerance)
    assert clean.num_cases == 4
    fault, kind = CASES[family]
    assert kind in clean.kinds
    fault(monkeypatch)
    broken = audited(family)
    assert not broken.passed
    assert broken.faults[0].kind == kind
