"""Trees of draft tokens: ancestry, the walk, and trees in the loop against plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dflash.core.loop import speculative_rounds
from dflash.core.reference import ReferenceAcceptor
from dflash.core.stopping import StopRule
from dflash.core.tree import ancestor_matrix, keys_seen, row_positions, walk
from dflash.types import Acceptance, Proposal, SamplingParams, Stats, Verdict
from tests.fakes import VOCAB, FakeDrafter, FakeTarget, guess_sometimes, random_logits, run_rounds, tokens_of
from tests.options import OPTIONS, with_option

PROMPT = (3, 1, 4)
LOGITS = random_logits(1)


def random_tree(rng: np.random.Generator, num_nodes: int, vocab_size: int = VOCAB) -> Proposal:
    """Any tree in topological order; children of one parent carry different tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    while len(tokens) < num_nodes:
        token, parent = int(rng.integers(vocab_size)), int(rng.integers(len(tokens) + 1))
        if (token, parent) not in zip(tokens, parents, strict=True):
            tokens.append(token)
            parents.append(parent)
    return Proposal.tree(tokens, parents)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("places", [range(20), range(5, 12), range(7, 40)])
def test_keys_seen_equals_its_definition(window: int | None, places: range) -> None:
    """A row sees a key iff it is committed, an ancestor's or its own, and lies less than a window of positions back."""
    rng = np.random.default_rng(6)
    for _ in range(10):
        proposal, start = random_tree(rng, int(rng.integers(1, 9))), int(rng.integers(1, 11))
        parents = proposal.parents or tuple(range(len(proposal.tokens)))
        num_rows = len(parents) + 3  # two rows of padding
        seen = keys_seen(start, num_rows, proposal, places, window)
        positions = row_positions(start, num_rows, proposal)
        for row in range(num_rows):
            above, node = {row}, row
            while 0 < node <= len(parents):
                node = parents[node - 1]
                above.add(node)
            for column, place in enumerate(places):
                is_fed = start <= place < start + num_rows
                visible = place < start or (is_fed and place - start in above)
                if visible and window is not None:
                    visible = positions[row] - (positions[place - start] if is_fed else place) < window
                assert seen[row, column] == visible


class TreeDrafter(FakeDrafter):
    """The chain of its guess, with random branches around it."""

    def __init__(self, seed: int, num_branches: int = 5) -> None:
        super().__init__(guess_sometimes(LOGITS, seed))
        self._rng = np.random.default_rng(seed)
        self._num_branches = num_branches

    def propose(self, anchor: int, budget: int) -> Proposal:
        chain = super().propose(anchor, budget).tokens
        tokens, parents = list(chain), list(range(len(chain)))
        for _ in range(self._num_branches):
            parent = int(self._rng.integers(len(tokens) + 1))
            depth = Proposal(tuple(tokens), tuple(parents)).depths()[parent] + 1
            token = int(self._rng.integers(VOCAB))
            if depth <= budget and (token, parent) not in zip(tokens, parents, strict=True):
                tokens.append(token)
                parents.append(parent)
        return Proposal.tree(tokens, parents)


def test_a_tree_of_one_chain_is_that_chain() -> None:
    """Fault: the common case runs the expensive path, with other bits."""
    assert Proposal.tree((4, 5, 6), (0, 1, 2)) == Proposal((4, 5, 6))
    assert Proposal.tree((), ()) == Proposal()
    tree = Proposal.tree((4, 5, 6), (0, 0, 2))
    assert (tree.parents, tree.depths(), tree.along((0, 2, 3))) == ((0, 0, 2), [0, 1, 1, 2], (5, 6))
    assert Proposal((4, 5, 6)).depths() == [0, 1, 2, 3]
    with pytest.raises(AssertionError):
        Proposal.tree((4, 5), (1, 0))


def test_ancestor_matrix_equals_its_definition() -> None:
    """Row i sees j exactly if following parents from i meets j; padding sees itself only."""
    rng = np.random.default_rng(0)
    for num_nodes in (0, 1, 5, 12):
        parents = [int(rng.integers(index + 1)) for index in range(num_nodes)]
        seen = ancestor_matrix(parents, num_nodes + 3)
        expected = np.zeros_like(seen)
        for row in range(num_nodes + 3):
            node = row
            expected[row, node] = True
            while 0 < node <= num_nodes:
                node = parents[node - 1]
                expected[row, node] = True
        assert (seen == expected).all()


def test_walk_equals_the_reference_acceptor() -> None:
    """Fault: a sibling's child, a second equal child or a skipped level is accepted. Random trees;
    logits that depend on the row only, so that taking a wrong row shows."""
    rng = np.random.default_rng(5)
    lengths = []
    for trial in range(300):
        proposal = random_tree(rng, int(rng.integers(0, 14)), vocab_size=4)
        logits = rng.normal(size=(len(proposal.tokens) + 1, 4)).astype(np.float32)
        choices = logits.argmax(-1)
        calls: list[tuple[int, int]] = []

        def choose(row: int, depth: int, choices: Sequence[int] = choices, calls: list[tuple[int, int]] = calls) -> int:
            calls.append((row, depth))
            return int(choices[row])

        acceptance = walk(proposal, choose)
        params = SamplingParams(temperature=0, seed=trial)
        assert acceptance == ReferenceAcceptor(params, (3, 1)).accept(proposal, Verdict(logits))
        assert calls == [(row, depth) for depth, row in enumerate(acceptance.path)]
        lengths.append(acceptance.num_accepted)
    assert max(lengths) >= 3
    assert walk(Proposal((7, 8)), lambda row, depth: (7, 9, 0)[row]) == Acceptance.chain(1, 9)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("option", OPTIONS)
def test_trees_never_change_the_tokens(option: str, temperature: float) -> None:
    """Fault: penalties, draws, features or kept rows follow the row number instead of the path. The fakes check that
    drafter and target are told the same committed tokens, with features of their own positions."""
    params = with_option(option, temperature=temperature, max_new_tokens=40, seed=5)
    plain = tokens_of(run_rounds(LOGITS, PROMPT, params))
    for seed in range(3):
        target, drafter = FakeTarget(LOGITS), TreeDrafter(seed)
        acceptor = ReferenceAcceptor(params, PROMPT)
        stop = StopRule(params.stop_token_ids)
        rounds = list(speculative_rounds(target, drafter, acceptor, stop, PROMPT, max_new_tokens=40))
        assert tokens_of(rounds) == plain
        assert target.committed == drafter.observed == (*PROMPT, *plain[:-1])


def test_slots_of_a_tree_are_its_depths() -> None:
    """Fault: statistics per slot count the nodes of a tree as slots."""
    drafter = TreeDrafter(1)
    params = SamplingParams(max_new_tokens=30)
    rounds = list(
        speculative_rounds(
            FakeTarget(LOGITS), drafter, ReferenceAcceptor(params, PROMPT), StopRule(), PROMPT, max_new_tokens=30
        )
    )
    stats = Stats()
    for step in rounds[1:]:
        stats.add(step)
    assert any(step.num_proposed > 4 for step in rounds)
    assert len(stats.proposed_per_slot) == 4
    assert sum(stats.accepted_per_slot) == stats.num_accepted


def test_a_target_without_trees_is_never_given_one() -> None:
    """Fault: a recurrent state is fed branches that it cannot tell apart."""
    params = SamplingParams(max_new_tokens=30)
    rounds = speculative_rounds(
        FakeTarget(LOGITS, trees=False),
        TreeDrafter(1),
        ReferenceAcceptor(params, PROMPT),
        StopRule(),
        PROMPT,
        max_new_tokens=30,
    )
    with pytest.raises(AssertionError, match="chains only"):
        list(rounds)
