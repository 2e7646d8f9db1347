"""Each part of a round gets its own time, also on a device that computes after the call has returned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dflash.backends.torch.clock import synchronised_clock
from dflash.core.loop import speculative_rounds
from dflash.core.stopping import StopRule
from dflash.types import Acceptance, Proposal, Verdict

DRAFT, VERIFY = 2.0, 5.0
CUDA = torch.device("cuda")


class LazyDevice:
    """Work is queued at once and takes its time when somebody waits for it."""

    def __init__(self) -> None:
        self.now = self.queued = 0.0

    def wait(self) -> None:
        self.now, self.queued = self.now + self.queued, 0.0

    # The three parts of a decoding loop on it: only the acceptor reads results.

    max_length = 100
    max_proposal = 1
    supports_trees = False

    def prefill(self, prompt_ids: Sequence[int]) -> Verdict:
        self.queued += VERIFY
        return Verdict(None)

    def verify(self, anchor: int, proposal: Proposal) -> Verdict:
        self.queued += VERIFY
        return Verdict(None)

    def commit(self, path: Sequence[int]) -> None:
        pass

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        pass

    def propose(self, anchor: int, budget: int) -> Proposal:
        self.queued += DRAFT
        return Proposal((1,))

    def accept(self, proposal: Proposal, verdict: Verdict) -> Acceptance:
        self.wait()
        return Acceptance.chain(len(proposal.tokens), 1)


@pytest.mark.parametrize("synchronised", [True, False])
def test_parts_of_a_round_on_a_lazy_device(synchronised: bool) -> None:
    """Guards against a profile that shows the target's time as "other"; the host's clock alone does exactly that."""
    device = LazyDevice()

    def host() -> float:
        return device.now

    clock = synchronised_clock(CUDA, wait=device.wait, host=host) if synchronised else host
    rounds = list(
        speculative_rounds(device, device, device, StopRule(frozenset()), [1], max_new_tokens=9, clock=clock)
    )[1:]
    assert {step.total_seconds for step in rounds} == {DRAFT + VERIFY}
    parts = {(step.draft_seconds, step.verify_seconds) for step in rounds}
    assert parts == ({(DRAFT, VERIFY)} if synchronised else {(0.0, 0.0)})


def test_the_cpu_needs_no_waiting() -> None:
    assert synchronised_clock(torch.device("cpu")) is time.perf_counter


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_waits_for_cuda() -> None:
    """Guards against a clock that is read while the device is still at work."""
    work, done = torch.randn(4096, 4096, device="cuda"), torch.cuda.Event()
    clock = synchronised_clock(torch.device("cuda"))
    clock()
    for _ in range(20):
        work = work @ work
    done.record()
    clock()
    assert done.query()
