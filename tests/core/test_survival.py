"""Estimates of acceptance: from the claim to the observed share, by class, by source and by request."""

from __future__ import annotations

import numpy as np
import pytest

from dflash.core.survival import CLAIM_STEPS, STRENGTH, Survival, claim_class


def key(source: str, slot: int, claim: float) -> tuple[str, int, int]:
    return (source, slot, claim_class(claim))


def test_without_counts_the_claim_is_the_estimate() -> None:
    assert Survival(Survival()).estimate(key("draft", 1, 0.4), 0.4) == pytest.approx(0.4)
    assert [claim_class(claim) for claim in (0.0, 0.05, 0.96, 1.0)] == [0, 1, len(CLAIM_STEPS) - 1, len(CLAIM_STEPS)]


def test_estimates_converge_to_the_observed_share_of_each_class() -> None:
    """Fault: a calibration that mixes slots or strengths of claims. Slot 1 is twice as good as it claims, slot 3 a
    tenth."""
    survival, rng = Survival(Survival()), np.random.default_rng(0)
    truth = {(1, 0.4): 0.8, (1, 0.1): 0.2, (3, 0.4): 0.04}
    for _ in range(400):
        for (slot, claim), share in truth.items():
            survival.update(key("draft", slot, claim), claim, bool(rng.random() < share))
    for (slot, claim), share in truth.items():
        assert survival.estimate(key("draft", slot, claim), claim) == pytest.approx(share, abs=0.06)


def test_a_source_that_claims_too_much_is_corrected_as_a_whole() -> None:
    """Fault: each class of a useless draft must be tried out on its own. After 40 rejects in one class, another class
    that was never seen is not believed either, while other sources are."""
    survival = Survival(Survival())
    for _ in range(40):
        survival.update(key("draft", 1, 0.9), 0.9, False)
    assert survival.estimate(key("draft", 2, 0.5), 0.5) < 0.15
    assert survival.estimate(key("copy", 0, 0.5), 0.5) == pytest.approx(0.5)


def test_a_request_starts_from_the_engine_and_departs_from_it() -> None:
    """Fault: requests share one estimate, or none: code and chat differ on one engine."""
    engine = Survival()
    first = Survival(engine)
    for _ in range(100):
        first.update(key("copy", 0, 0.5), 0.5, False)
    second = Survival(engine)
    start = second.estimate(key("copy", 0, 0.5), 0.5)
    assert start < 0.1
    for _ in range(60):
        second.update(key("copy", 0, 0.5), 0.5, True)
    assert second.estimate(key("copy", 0, 0.5), 0.5) > 0.6
    assert Survival(engine).estimate(key("copy", 0, 0.5), 0.5) < 0.5


def test_old_counts_fade() -> None:
    """Fault: after thousands of rounds nothing new can be learnt."""
    survival = Survival()
    for _ in range(5000):
        survival.update(key("copy", 0, 0.5), 0.5, True)
    for _ in range(400):
        survival.update(key("copy", 0, 0.5), 0.5, False)
    assert survival.estimate(key("copy", 0, 0.5), 0.5) < 0.5
    assert STRENGTH > 0
