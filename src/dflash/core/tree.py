"""Trees of draft tokens: growing one from guesses, which keys its rows see, and the walk that finds the accepted path.

A tree is fed as rows in topological order (`Proposal.parents`); row 0 is the anchor's. Growing is best-first
(arXiv:2604.12989): the node whose path is likeliest to be accepted comes next, so that the first N nodes are the best
tree of N nodes under the estimates, and any prefix of the list is a tree. Knows no tensors of a backend.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dflash.core.guesses import ROOT, Guess, Guesses, Node
from dflash.types import Acceptance, DrawnFrom, Proposal

WIDE_ROUNDINGS, HALF_ROUNDINGS, HALF_PRECISION = 32, 4, 1e-4
"""Roundings by which a row of a tree may differ from the same row of a chain: measured on a CPU, 4e-5 at logits of 20
in float32. In half precision, whose rounding is coarser than the last number, one rounding of the result hides most."""


def ancestor_matrix(parents: Sequence[int], num_rows: int) -> NDArray[np.bool_]:
    """[num_rows, num_rows]: whether row i may see row j, that is j is i or one of its ancestors.

    `parents` as in `Proposal`, one per row behind the anchor's; further rows are padding and see themselves only.
    """
    seen = np.eye(num_rows, dtype=np.bool_)
    for index, parent in enumerate(parents):
        seen[index + 1] |= seen[parent]
    return seen


def row_positions(start: int, num_rows: int, proposal: Proposal) -> Sequence[int]:
    """Positions of a forward's rows behind `start` committed tokens: one after the other, or in a tree by depth.
    Padding rows have some position."""
    if proposal.parents is None:
        return range(start, start + num_rows)
    depths = proposal.depths()
    return [start + depth for depth in (*depths, *[0] * (num_rows - len(depths)))]


def keys_seen(
    start: int, num_rows: int, proposal: Proposal, places: range, window: int | None = None
) -> NDArray[np.bool_]:
    """[num_rows, len(places)]: which stored keys each row of a forward sees.

    Args:
        start: committed tokens; row i is stored at place start + i, wherever in the text it belongs.
        num_rows: rows fed; those behind the proposal's are padding, which sees itself and what is committed.
        places: of the keys that attention gets; behind the fed rows' there is nothing to see.
        window: positions that a row sees at most, its own included; None = all.
    """
    rows, stored = np.array(row_positions(start, num_rows, proposal)), np.arange(places.start, places.stop)
    parents = range(len(proposal.tokens)) if proposal.parents is None else proposal.parents
    is_fed = (stored >= start) & (stored < start + num_rows)
    fed = stored[is_fed] - start
    seen = np.tile(stored < start, (num_rows, 1))
    seen[:, is_fed] = ancestor_matrix(parents, num_rows)[:, fed]
    if window is not None:
        positions = stored.copy()
        positions[is_fed] = rows[fed]
        seen &= rows[:, None] - positions < window
    return seen


def is_prefix(path: Sequence[int]) -> bool:
    """Whether an ascending path is 0, 1, 2 ..., as a chain's is."""
    return not path or path[-1] == len(path) - 1


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


def tie_margin(eps: float) -> float:
    """Distance of two logits, as a share of the larger, that the order of summation may make or undo between the same
    row in a tree and in a chain; `eps` of the type that they were computed in."""
    return eps * (WIDE_ROUNDINGS if eps < HALF_PRECISION else HALF_ROUNDINGS)


def undecided(proposal: Proposal, acceptance: Acceptance, is_near_tie: Callable[[int], bool]) -> Acceptance:
    """The acceptance without what rounding may have decided: it ends in front of the first row of a branch that is a
    near-tie, whose token becomes the next anchor and is judged again in a row of its own.

    A row whose ancestors are not its neighbours sees them at other places of the cache than a chain would, which may
    change its last bits; a row that continues the first branch does not. `is_near_tie`: of a row of the path.
    """
    for step, row in enumerate(acceptance.path):
        if row != step and is_near_tie(row):
            return Acceptance(acceptance.path[:step], proposal.tokens[row - 1])
    return acceptance


def walk_drawn(
    proposal: Proposal,
    choose: Callable[[int, int], int],
    accepts: Callable[[int, int, DrawnFrom], bool],
    replacement: Callable[[int, DrawnFrom], int],
) -> Acceptance:
    """The same for a chain with tokens that were drawn: each is accepted with min(1, p/q), and where it is not, the
    next token comes from what p has beyond q (arXiv:2211.17192). Point masses among them are compared as in `walk`.

    Args:
        accepts: (row, token, q) -> whether the token drawn from q stands behind that row.
        replacement: (row, q) -> a token from the residual (p - q)+.
    """
    for row, (token, drawn_from) in enumerate(zip(proposal.tokens, proposal.drawn_from, strict=True)):
        if drawn_from is None:
            own = choose(row, row)
            if own != token:
                return Acceptance.chain(row, own)
        elif not accepts(row, token, drawn_from):
            return Acceptance.chain(row, replacement(row, drawn_from))
    last = len(proposal.tokens)
    return Acceptance.chain(last, choose(last, last))


def grow_chain(guesses: Guesses, *, max_depth: int, least: float) -> list[Node]:
    """The likeliest guess behind the likeliest guess, and so on: at most `max_depth` nodes that are each accepted with
    at least probability `least`."""
    nodes: list[Node] = []
    node = ROOT
    while len(nodes) < max_depth:
        found = guesses.after(node)
        if not found or node.survival * found[0].chance < least:
            break
        node = guesses.child(node, len(nodes), found[0])
        nodes.append(node)
    return nodes


def grow_tree(guesses: Guesses, *, max_nodes: int, max_depth: int, least: float) -> list[Node]:
    """The `max_nodes` nodes with the highest survival, parents first: each one is at most `max_depth` tokens behind the
    anchor and accepted with at least probability `least`."""
    nodes: list[Node] = []
    # Behind (survival, order) the rest is never compared: next guess of a parent's list, and where it is fed.
    heap: list[tuple[float, int, Node, int, list[Guess], int]] = []
    serial = 0

    def push(parent: Node, row: int, options: list[Guess], choice: int) -> None:
        nonlocal serial
        if choice < len(options):
            survival = parent.survival * options[choice].chance
            if survival >= least:
                heapq.heappush(heap, (-survival, serial, parent, row, options, choice))
                serial += 1

    push(ROOT, 0, guesses.after(ROOT), 0)
    while heap and len(nodes) < max_nodes:
        _, _, parent, row, options, choice = heapq.heappop(heap)
        node = guesses.child(parent, row, options[choice])
        nodes.append(node)
        push(parent, row, options, choice + 1)
        if len(node.path) < max_depth:
            push(node, len(nodes), guesses.after(node), 0)
    return nodes
