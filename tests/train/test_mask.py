"""The dense mask, the definition that fast attention is tested against (tests/backends/test_draft_model.py)."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash.train.mask import dense_mask


def test_by_hand() -> None:
    """Guards against any drift of the definition: two blocks of two behind four context rows, drawn by hand."""
    expected = """
        1 0 0 0   1 1 0 0
        1 0 0 0   1 1 0 0
        1 1 1 0   0 0 1 1
        1 1 1 0   0 0 1 1
    """
    drawn = [[bool(int(bit)) for bit in line.split()] for line in expected.strip().splitlines()]
    np.testing.assert_array_equal(dense_mask([1, 3], num_context=4, block_size=2), drawn)


@given(
    anchors=st.lists(st.integers(0, 9), min_size=1, max_size=4), num_context=st.integers(0, 9), block=st.integers(2, 4)
)
def test_equals_the_rule_of_the_paper(anchors: list[int], num_context: int, block: int) -> None:
    """Guards against a row that sees its own anchor's feature, later context or another block: the four-line rule over
    a grid of (query, key), written with index arithmetic in place of the loops."""
    mask = dense_mask(anchors, num_context=num_context, block_size=block)
    query, key = np.meshgrid(np.arange(len(anchors) * block), np.arange(mask.shape[1]), indexing="ij")
    to_context = (key < num_context) & (key < np.asarray(anchors)[query // block])
    to_block = (key >= num_context) & ((key - num_context) // block == query // block)
    np.testing.assert_array_equal(mask, to_context | to_block)


def test_no_row_is_fully_masked() -> None:
    """Guards against NaN from an empty softmax: a padding block at position 0 sees itself."""
    assert dense_mask([0, 0], num_context=3, block_size=2).any(axis=1).all()
