"""What all tests start from."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background makes them, and every command that they start, deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # imports and collected tests all stay: looking for garbage among them takes a fifth of collecting


LONG_FIRST = ("backends", "train", "audit", "core", "check", "cli", "prepare")
"""Folders of the files that take longest: of two processes, none shall start one of these when the other is done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the many short ones fill the end. Files are handed out in this order, see the Makefile."""
    ranks = {folder: rank for rank, folder in enumerate(LONG_FIRST)}
    here = Path(__file__).parent
    items.sort(key=lambda item: ranks.get(item.path.relative_to(here).parts[0], len(ranks)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def loading_measures_briefly() -> Iterator[None]:
    """Loading a pair times its forwards for more than a second, so that costs are good; the tests load hundreds of tiny
    pairs, and no text may depend on what rounds cost. Here it makes its least number of sweeps over all widths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash.core.calibration.QUICK_SECONDS", 0.0)
        yield
