"""What drafters say of their slots: the likeliest walk through the table of candidates is what they would propose."""

from __future__ import annotations

import dataclasses
import math

import pytest

from dflash.backends.torch.target import TorchTarget
from dflash.core.guesses import ROOT, Guesses
from dflash.core.survival import Survival
from dflash.core.tree import grow_chain, grow_tree
from tests.backends.test_draft_networks import BASE, KINDS, TAPS, H, network, random, session_of
from tests.backends.tiny_targets import llama


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "reduced" not in kind])
def test_the_likeliest_walk_is_the_proposal(kind: str) -> None:
    """Fault: a table that is shifted by a slot, read by columns instead of rows, or blind to the token before, so that
    drafting by cost proposes something else than the draft means. Chains from the table against `propose`; the
    probabilities are those of a distribution, and a tree contains the chain."""
    draft = network(dataclasses.replace(BASE, **KINDS[kind]))
    target = TorchTarget(llama(), taps=TAPS)
    for seed, anchor in ((0, 17), (1, 5), (2, 40)):
        session = session_of(draft, target, random(19, 2 * H, seed=seed))
        expected = session.propose(anchor, 4).tokens
        table = session.candidates(anchor, 4, 3)
        assert (table.transitions is not None) == draft.config.has_transitions
        assert len(table.ids) == len(table.log_probs) == len(expected) == 4
        rows = [*table.log_probs, *(row for slot in table.transitions or () for row in slot)]
        assert all(sum(map(math.exp, row)) < 1 + 1e-5 for row in rows)
        guesses = Guesses(Survival(), table=table, branching=3)
        chain = grow_chain(guesses, max_depth=4, least=0.0)
        assert chain[-1].path == expected
        tree = grow_tree(guesses, max_nodes=200, max_depth=4, least=0.0)
        assert expected in {node.path for node in tree}
        survivals = [node.survival for node in tree]
        assert survivals == sorted(survivals, reverse=True)
        assert sum(guess.chance for guess in guesses.after(ROOT)) <= 1 + 1e-9
