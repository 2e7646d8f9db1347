"""Clocks for the decoding loop on devices that compute behind the host's back."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dflash.types import Clock


def synchronised_clock(
    device: torch.device, *, wait: Callable[[], object] | None = None, host: Clock = time.perf_counter
) -> Clock:
    """A clock in seconds that first waits until `device` has done all that it was given.

    A forward on a GPU returns before it is computed; read by the host's clock, the wait for it would count for whatever
    reads its result first. On the CPU the host's clock is right as it is. `wait` and `host` are replaced in tests.
    """
    wait = wait or waiting_for(device)
    if wait is None:
        return host

    def read() -> float:
        wait()
        return host()

    return read


def waiting_for(device: torch.device) -> Callable[[], object] | None:
    """What blocks until `device` is idle; None for the CPU, which never computes later than it returns."""
    if device.type == "cpu":
        return None
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: torch.accelerator.synchronize(device)
