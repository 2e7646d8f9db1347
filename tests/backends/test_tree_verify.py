"""Trees in the torch target: every path of a tree gives the logits, features and state of feeding that path alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash.backends.torch.compat import LayerSpec
from dflash.backends.torch.masks import BlockMask, tree_mask
from dflash.backends.torch.sampling import TorchAcceptor
from dflash.backends.torch.state import SessionCache
from dflash.backends.torch.target import TorchTarget
from dflash.core.reference import ReferenceAcceptor
from dflash.types import Proposal, Verdict
from tests.backends.tiny_targets import llama, tokens
from tests.core.test_tree import random_tree
from tests.options import OPTIONS, with_option

PROMPT = tokens(9)
NEXT = tokens(3, seed=2)
ANCHOR = 5
TREE = Proposal.tree((7, 8, 9, 10, 11, 12, 13), (0, 1, 0, 3, 2, 3, 6))
PATHS = [(0,), (0, 1), (0, 3), (0, 1, 2), (0, 1, 2, 5), (0, 3, 4), (0, 3, 6), (0, 3, 6, 7)]


@pytest.mark.parametrize(("exact", "exact_width"), [(False, 1), (True, 1), (True, 12)])
def test_every_path_equals_its_chain(exact: bool, exact_width: int) -> None:
    """Fault: a row sees a sibling's branch or padding, sits at its row's position instead of its depth's, or commit
    keeps the wrong rows. Rotary positions and scale 0.2 weights make any of these visible."""
    target = TorchTarget(llama(), taps=(0, 2), exact_width=exact_width)
    for path in PATHS:
        ours, chain = target.session(exact=exact), target.session(exact=exact)
        for session in (ours, chain):
            session.prefill(PROMPT)
        assert ours.supports_trees
        verdict = ours.verify(ANCHOR, TREE)
        expected = chain.verify(ANCHOR, Proposal(TREE.along(path)))
        rows = list(path)
        assert len(verdict.logits) == 8
        torch.testing.assert_close(verdict.logits[rows], expected.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(verdict.features[rows], expected.features, rtol=1e-4, atol=1e-4)
        ours.commit(path)
        chain.commit(range(len(path)))
        assert ours.num_tokens == chain.num_tokens == len(PROMPT) + len(path)
        step = Proposal(tuple(NEXT[1:]))
        torch.testing.assert_close(
            ours.verify(NEXT[0], step).logits, chain.verify(NEXT[0], step).logits, rtol=1e-4, atol=1e-4
        )


def test_a_tree_may_reach_the_end_of_the_context() -> None:
    """Fault: the rows of a wide tree are counted as context, or its mask leaves the storage."""
    text = tokens(31)
    target = TorchTarget(llama(max_length=32), exact_width=4)
    for exact in (False, True):
        session = target.session(exact=exact)
        session.prefill(text[:28])
        wide = Proposal.tree((1, 2, 3, 4, 5, 6), (0, 0, 0, 3, 4, 0))
        session.verify(text[28], wide)
        session.commit((0, 3, 4))
        chain = target.session(exact=exact)
        chain.prefill([*text[:29], 3, 4])
        torch.testing.assert_close(
            session.verify(9, Proposal()).logits, chain.verify(9, Proposal()).logits, rtol=1e-4, atol=1e-4
        )


def test_tree_mask_equals_its_definition() -> None:
    masks = BlockMask(torch.device("cpu"), torch.float32)
    assert TREE.parents is not None
    for start, num_rows, num_keys in ((3, 8, 11), (3, 10, 32), (22, 10, 32)):
        causal = masks.rows(start, num_rows, num_keys, 32)
        before = causal.clone()
        mask = tree_mask(causal, start, TREE.parents)
        assert torch.equal(causal, before), "the shared buffer is changed"
        for row in range(num_rows):
            seen = set(range(start))
            node = row
            while node:
                seen.add(start + node)
                node = TREE.parents[node - 1] if node <= 7 else -1
                if node < 0:
                    break
            if row <= 7:
                seen.add(start)
            expected = [key in seen for key in range(num_keys)]
            assert (mask[0, 0, row] == 0).tolist() == expected


def test_paths_must_be_rows_in_order() -> None:
    cache = SessionCache([LayerSpec("DynamicLayer")], bucket=8)
    cache.begin(4, exact=False)
    for wrong in ((1, 0), (0, 4), (0, 0)):
        with pytest.raises(AssertionError):
            cache.commit(wrong)


@pytest.mark.parametrize("row_by_row", [True, False])
@pytest.mark.parametrize("option", OPTIONS)
def test_torch_walk_equals_the_reference(option: str, row_by_row: bool) -> None:
    """Fault: draws or penalties of a row follow its number instead of its depth and ancestors."""
    rng = np.random.default_rng(3)
    for temperature in (0.0, 0.9):
        params = with_option(option, temperature=temperature, max_new_tokens=40, seed=5)
        reference = ReferenceAcceptor(params, (3, 1, 4))
        acceptor = TorchAcceptor(params, (3, 1, 4), 12, row_by_row=row_by_row)
        for _ in range(12):
            proposal = random_tree(rng, int(rng.integers(0, 30)))
            logits = rng.normal(size=(len(proposal.tokens) + 1, 12)).astype(np.float32)
            expected = reference.accept(proposal, Verdict(logits))
            assert acceptor.accept(proposal, Verdict(torch.from_numpy(logits))) == expected
