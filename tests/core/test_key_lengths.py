"""Numbers of keys in exact mode: the search keeps those whose sums agree, and the least one is taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dflash.core.key_lengths import BLOCK, BUCKETS, KeyLengths, find_key_lengths


def found(order: Callable[[int], object], step: int = 128) -> tuple[int, ...] | None:
    """What is found where sums over n keys run in the order `order(n)`."""
    lengths = find_key_lengths(lambda seen, num_keys: order(num_keys), lambda a, b: a == b, step)
    return lengths.within if lengths else None


def halved(num_keys: int) -> str:
    """As MKL sums: pieces of 192, but 193 to 383 keys in halves."""
    return "halves" if 192 < num_keys % BLOCK < 384 else "pieces"


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (lambda num_keys: 0, (128, 256, 384, 512)),
        (halved, (128, 384, 512)),
        (lambda num_keys: num_keys % BLOCK, (512,)),
        (lambda num_keys: num_keys, None),
        (lambda num_keys: num_keys > BLOCK, None),
        (lambda num_keys: num_keys == 640, (256, 384, 512)),
    ],
)
def test_lengths_whose_sums_agree_are_found(order: Callable[[int], object], expected: tuple[int, ...] | None) -> None:
    """Fault: a length passes that gives other bits than longer ones, in the first block or behind it."""
    assert found(order) == expected


def test_finer_steps() -> None:
    """Fault: lengths between the buckets are passed over, and attention reads keys that nobody sees."""
    assert found(halved, step=32) == (32, 64, 96, 128, 160, 192, 384, 416, 448, 480, 512)


@pytest.mark.parametrize(
    ("num_keys", "expected"),
    [(1, 128), (128, 128), (129, 384), (384, 384), (512, 512), (513, 640), (641, 896), (1024, 1024), (1025, 1152)],
)
def test_the_least_length_that_holds_the_keys(num_keys: int, expected: int) -> None:
    """Fault: a length is too short by one, or a block too many is taken at a border."""
    assert KeyLengths((128, 384, BLOCK)).least(num_keys) == expected


def test_where_nothing_was_measured() -> None:
    assert [BUCKETS.least(num_keys) for num_keys in (1, 129, 512, 600)] == [128, 256, 512, 640]
