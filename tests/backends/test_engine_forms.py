"""What an engine is told at load, or measures there, reaches the forwards: kernels, clocks and dtypes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash.backends.torch import engine as engine_module
from dflash.backends.torch.drafters.block import BlockDrafter
from dflash.backends.torch.engine import TorchEngine as Engine
from dflash.types import Drafting
from tests.backends.pairs import GREEDY, PROMPTS, SAMPLED, open_engine


@pytest.mark.parametrize("faster", [True, False])
def test_plain_decoding_takes_the_faster_kernels(
    faster: bool, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured at load must reach the target that decodes, and the record."""
    asked: list[object] = []

    def measure(model: object) -> bool:
        asked.append(model)
        return faster

    monkeypatch.setattr(engine_module, "packed_steps_are_faster", measure)
    plain = open_engine(target_folder, None)
    assert asked == [plain.target.model]
    assert plain.target.packs_single is plain.info.packs_single is faster
    assert len(plain.generate("hi", GREEDY, exact=False).token_ids) == GREEDY.max_new_tokens
    plain.close()


@pytest.mark.parametrize("profile", [True, False])
def test_profile_reads_the_device_clock(profile: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the device's own clock a profile on a GPU shows the target's time as "other"."""
    readings: list[object] = []

    def clock(device: torch.device) -> Callable[[], float]:
        def read() -> float:
            readings.append(device)
            return time.perf_counter()

        return read

    monkeypatch.setattr(engine_module, "synchronised_clock", clock)
    events = list(engine.stream("hi", GREEDY, profile=profile))
    assert len(readings) >= 5 * (len(events) - 1) if profile else not readings
    assert set(readings) <= {engine.target.device}


def test_float16_target(target_folder: Path, trained_folder: Path) -> None:
    """A target in float16: the draft runs in float32 (float16 overflows in its feature fusion), casts at its border,
    still predicts, and changes no token."""
    pair = open_engine(target_folder, trained_folder, dtype="float16")
    assert pair.info.dtype == "float16"
    assert isinstance(pair.drafter, BlockDrafter)
    assert {weight.dtype for weight in pair.drafter.network.parameters()} == {torch.float32}
    for params in (GREEDY, SAMPLED):
        plain = pair.generate(PROMPTS[0], params, use_draft=False)
        drafted = pair.generate(PROMPTS[0], params, drafting=Drafting(fixed=True))
        assert drafted.stats.num_proposed > 0
        if pair.info.exact:
            assert drafted.token_ids == plain.token_ids
        if params is GREEDY:
            assert drafted.stats.num_accepted > 20
    pair.close()
