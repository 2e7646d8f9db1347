"""What a language model that drafts has to remember, whatever library computes it: the committed text, and no more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from dflash.core.autoregressive import CHAIN
from dflash.types import CandidateTable, Proposal

ROUNDS = ((0, 1), (3, 2), (7, 1), (20, 0), (2, 0), (4, 1), (1, 3))
"""Per round: draft tokens that are accepted, and how often the draft is asked before (0 = a copy was fed)."""


def follow(
    sessions: Sequence[Any],
    draw: Sequence[int],  # at least 230 token ids
    same: Callable[[Proposal, Proposal], None] = lambda one, other: None,
) -> list[int]:
    """Take several sessions of one draft through the same rounds; the text they have seen, and the anchor behind it.

    Asserts that all propose the same tokens (`same` may ask for more), and that each holds the text's own tokens.
    """
    text, at = list(draw[:9]), 9
    for one in sessions:
        one.observe(text, None)
    for accepted, asks in ROUNDS:
        anchor = draw[at]
        proposals = [one.propose(anchor, CHAIN) for one in sessions for _ in range(asks)]
        own = list(proposals[0].tokens)[:accepted] if proposals else []
        committed = [anchor, *own, *draw[at + 1 : at + 1 + accepted - len(own)]]
        assert all(proposal.tokens == proposals[0].tokens for proposal in proposals)
        for one, other in combinations(proposals, 2):
            same(one, other)
        text, at = [*text, *committed], at + 30
        for one in sessions:
            one.observe(committed, None)
            assert one._fed == text[: len(one._fed)]
            assert len(one._fed) == one._session.num_tokens
    return [*text, draw[at]]


def check_table(table: CandidateTable, chain: Sequence[int], count: int) -> None:
    """Each slot has `count` distinct candidates, best first, the chain's token before all; their probabilities are
    shares of 1."""
    assert tuple(ids[0] for ids in table.ids) == tuple(chain)
    for ids, row in zip(table.ids, table.log_probs, strict=True):
        assert len(set(ids)) == len(row) == count
        assert list(row) == sorted(row, reverse=True)
        assert row[0] < 0
        assert sum(map(math.exp, row)) <= 1
