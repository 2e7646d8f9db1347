"""Trees of draft tokens: who is whose ancestor, and the walk that finds the accepted path.

A tree is fed as rows in topological order (`Proposal.parents`); row 0 is the anchor's. Knows no probabilities and no
tensors of a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dflash.types import Acceptance, Proposal


def ancestor_matrix(parents: Sequence[int], num_rows: int) -> NDArray[np.bool_]:
    """[num_rows, num_rows]: whether row i may see row j, that is j is i or one of its ancestors.

    `parents` as in `Proposal`, one per row behind the anchor's; further rows are padding and see themselves only.
    """
    seen = np.eye(num_rows, dtype=np.bool_)
    for index, parent in enumerate(parents):
        seen[index + 1] |= seen[parent]
    return seen


def walk(proposal: Proposal, choose: Callable[[int, int], int]) -> Acceptance:
    """Follow the target's own tokens from the anchor through the tree, as far as draft tokens carry them.

    Exact at any temperature, whatever the tree: it is a function of the history, and all tokens are the target's (its
    arg max or a draw from its distribution). A chain is a tree with one child everywhere.

    Args:
        choose: (row, its depth) -> the target's token after that row; called along the path only, in order.
    """
    tokens, parents = proposal.tokens, proposal.parents
    path = [0]
    token = choose(0, 0)
    if parents is None:
        while len(path) <= len(tokens) and tokens[len(path) - 1] == token:
            path.append(len(path))
            token = choose(path[-1], len(path) - 1)
        return Acceptance(tuple(path), token)
    for index, parent in enumerate(parents):  # children stand behind their parents
        if parent == path[-1] and tokens[index] == token:
            path.append(index + 1)
            token = choose(index + 1, len(path) - 1)
    return Acceptance(tuple(path), token)
