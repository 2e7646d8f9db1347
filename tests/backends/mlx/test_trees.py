"""Trees in the MLX target: every path gives the logits, features and state of feeding that path alone as a chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")

import mlx.nn as nn  # noqa: E402

from dflash.backends.mlx.compat import rotary_embeddings  # noqa: E402
from dflash.backends.mlx.positions import RowPositions, RowRopes  # noqa: E402
from dflash.backends.mlx.sampling import MLXAcceptor  # noqa: E402
from dflash.backends.mlx.state import SessionCache  # noqa: E402
from dflash.backends.mlx.target import MLXTarget, MLXTargetSession  # noqa: E402
from dflash.core.reference import ReferenceAcceptor  # noqa: E402
from dflash.core.tree import keys_seen  # noqa: E402
from dflash.types import Acceptance, DrawnFrom, Proposal, SamplingParams, Verdict  # noqa: E402
from tests.backends.mlx.families import FAMILIES, MAX_LENGTH, tokens  # noqa: E402
from tests.backends.mlx.test_families import close  # noqa: E402
from tests.core.test_tree import random_tree  # noqa: E402
from tests.options import OPTIONS, with_option  # noqa: E402

PROMPT = tokens(11)
NEXT = tokens(3, seed=2)
ANCHOR = 5
TREE = Proposal.tree((7, 8, 9, 10, 11, 12, 13), (0, 1, 0, 3, 2, 3, 6))
PATHS = [(0, 3), (0, 1, 2, 5), (0, 3, 6, 7)]
WITH_TREES = [name for name, family in FAMILIES.items() if family.refused is family.no_trees is None]
WITHOUT = [name for name, family in FAMILIES.items() if family.no_trees is not None]


def compare_paths(shared: MLXTarget, *, exact: bool) -> None:
    """Every path in the tree and after its commit, with the path fed alone."""
    for path in PATHS:
        ours, chain = shared.session(exact=exact), shared.session(exact=exact)
        for session in (ours, chain):
            session.prefill(PROMPT)
        assert ours.supports_trees
        verdict, expected = ours.verify(ANCHOR, TREE), chain.verify(ANCHOR, Proposal(TREE.along(path)))
        rows = list(path)
        assert len(verdict.logits) == len(verdict.features) == 8
        close(verdict.logits[rows], expected.logits)
        close(verdict.features[rows], expected.features)
        ours.commit(path)
        chain.commit(range(len(path)))
        assert ours.num_tokens == chain.num_tokens == len(PROMPT) + len(path)
        for left, right in zip(states(ours), states(chain), strict=True):
            close(left.astype(mx.float32), right.astype(mx.float32))
        step = Proposal(tuple(NEXT[1:]))
        close(ours.verify(NEXT[0], step).logits, chain.verify(NEXT[0], step).logits)


def states(session: MLXTargetSession) -> list[Any]:
    found = [one for layer in session._cache.layers for one in layer.committed()]
    assert found
    return found


@pytest.mark.parametrize("name", WITH_TREES)
def test_every_path_equals_its_chain(name: str) -> None:
    """Fault: a row sees a sibling's branch or padding, sits at its row's position instead of its depth's, a window
    counts rows instead of positions, or commit keeps the wrong rows. Prompts leave the windows; exact mode pads."""
    model = FAMILIES[name].build()
    kinds = [type(module) for module in model.modules()]
    shared = MLXTarget(model, max_length=MAX_LENGTH, taps=(0, 1), exact_width=12)
    assert shared.no_trees is None
    for exact in (False, True):
        compare_paths(shared, exact=exact)
    shared.close()
    assert [type(module) for module in model.modules()] == kinds


def test_quantised_keys_and_values_move_as_well() -> None:
    """Fault: codes of the kept rows move, and their scales stay."""
    family = FAMILIES["Llama"]
    wide = type(family)(family.module, {"head_dim": 64}, family.states)
    shared = MLXTarget(wide.build(), max_length=MAX_LENGTH, taps=(0, 1), kv_bits=8)
    compare_paths(shared, exact=True)
    shared.close()


def test_scales_by_position_follow_the_depth_beside_windows() -> None:
    """Fault: a model that scales queries by position counts from the state of a layer with a window."""
    family = FAMILIES["Ministral 3"]
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    model = type(family)(family.module, {**family.changes, **kinds}, family.states).build()
    shared = MLXTarget(model, max_length=MAX_LENGTH, taps=(0, 1), exact_width=12)
    compare_paths(shared, exact=True)
    shared.close()


@pytest.mark.parametrize("name", WITHOUT)
def test_models_that_cannot_hold_branches_say_why(name: str) -> None:
    """Fault: a recurrent layer runs all branches one after the other."""
    model = FAMILIES[name].build()
    shared = MLXTarget(model, max_length=MAX_LENGTH, fast_rollback=False)
    kinds = [type(module) for module in model.modules()]
    assert str(FAMILIES[name].no_trees) in str(shared.no_trees)
    assert not shared.session().supports_trees
    assert [type(module) for module in model.modules()] == kinds, "nothing is watched in vain"
    shared.close()


class Curious(nn.Module):
    """A rotary embedding that does something with the offset beside."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        super().__init__()
        self.look = look
        self.rope = nn.RoPE(16)

    def __call__(self, x: Any, offset: Any = 0) -> Any:
        self.look(offset)
        return self.rope(x, offset=offset)


def is_int(offset: Any) -> None:
    assert isinstance(offset, int)


LOOKS: dict[str, Callable[[Any], Any]] = {
    "method": lambda offset: offset if isinstance(offset, int) else offset.item(),
    "index": lambda offset: offset if isinstance(offset, int) else offset[0],
    "sum": lambda offset: offset + 1,
    "array": mx.array,
    "check": is_int,
    "key": lambda offset: {0: 1}.get(offset),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_model_that_looks_at_positions_decodes_in_chains(look: str) -> None:
    """Fault: a model that decoded well is ended by the trial, or passes it."""
    model = FAMILIES["Llama"].build()
    model.layers[1].self_attn.rope = Curious(LOOKS[look])
    shared = MLXTarget(model, max_length=MAX_LENGTH)
    assert "more than a rotary embedding" in str(shared.no_trees)
    session = shared.session()
    session.prefill(PROMPT)
    close(session.verify(ANCHOR, Proposal()).logits[0], model(mx.array([[*PROMPT, ANCHOR]]))[0, -1])
    shared.close()


def test_a_tree_may_reach_the_end_of_the_context() -> None:
    """Fault: the rows of a wide tree are counted as context."""
    text = tokens(31)
    shared = MLXTarget(FAMILIES["Gemma 3"].build(), max_length=32, exact_width=4)
    for exact in (False, True):
        session, chain = shared.session(exact=exact), shared.session(exact=exact)
        session.prefill(text[:28])
        session.verify(text[28], Proposal.tree((1, 2, 3, 4, 5, 6), (0, 0, 0, 3, 4, 0)))
        session.commit((0, 3, 4))
        chain.prefill([*text[:29], 3, 4])
        close(session.verify(9, Proposal()).logits, chain.verify(9, Proposal()).logits)
    shared.close()


def test_rejected_trees_leave_no_trace_over_a_long_text() -> None:
    """Fault: a window's storage moves on between a tree and its commit, or branches pile up. Random trees over several
    buckets, each cut at a random node; then the bare model over what was kept."""
    model = FAMILIES["Gemma 3"].build()
    shared = MLXTarget(model, max_length=MAX_LENGTH)
    rng = np.random.default_rng(2)
    session, kept = shared.session(exact=False), list(PROMPT)
    session.prefill(PROMPT)
    while len(kept) < 300:
        tree, anchor = random_tree(rng, int(rng.integers(2, 24)), vocab_size=97), int(rng.integers(97))
        session.verify(anchor, tree)
        parents = tree.parents or tuple(range(len(tree.tokens)))
        path = [int(rng.integers(len(tree.tokens) + 1))]
        while path[0]:
            path.insert(0, parents[path[0] - 1])
        session.commit(path)
        kept += [anchor, *tree.along(path)]
    close(session.verify(NEXT[0], Proposal()).logits[0], model(mx.array([[*kept, NEXT[0]]]))[0, -1])
    shared.close()


def test_masks_of_chains_are_the_definition() -> None:
    """Fault: the definition of core, from which the masks of trees are made, is another one than the chains'."""
    for window in (None, 4):
        for start, num_rows, exact in ((0, 5, True), (9, 3, False), (200, 6, True)):
            model = FAMILIES["Llama with windows"].build()
            cache = SessionCache(MLXTarget(model, max_length=MAX_LENGTH).model.make_cache())
            state: Any = cache.layers[0]
            state.window = window
            cache.span.start = start
            cache.begin(num_rows, exact=exact)
            first, end = state._seen()
            mask = np.array(state.make_mask(num_rows, return_array=True)[0, 0])
            expected = keys_seen(start, num_rows, Proposal((0,) * (num_rows - 1)), range(first, end), window)
            np.testing.assert_array_equal(mask, expected)


def test_positions_are_of_no_use_to_anybody_else() -> None:
    """Fault: a model computes with the positions of a tree as if they were one number, and nobody notices."""
    positions = RowPositions((3, 4, 4))
    for use in (bool, int, float, lambda p: p + 1, lambda p: p == 0, lambda p: p < 3, lambda p: mx.arange(p, 9)):
        with pytest.raises((TypeError, ValueError)):
            use(positions)
    assert not positions.was_copied
    assert (mx.arange(3) + positions).tolist() == [3, 5, 6]
    assert positions.was_copied


def test_a_model_that_counts_on_gets_each_rows_position() -> None:
    """Fault: rows of a tree are counted on from their own positions, or nobody learns that they left the object."""
    positions = RowPositions((3, 4, 4), counted_on=True)
    assert (mx.arange(3) + positions).tolist() == positions.rows.tolist() == [3, 4, 4]
    assert positions.was_copied


@pytest.mark.parametrize("name", ["Llama", "GLM-4-MoE", "DeepSeek-V3, Kimi-K2", "Gemma 4"])
def test_ropes_turn_each_row_and_are_left_as_they_were(name: str) -> None:
    """Fault: a row is turned by another row's position, or an embedding stays changed while one target is open, after
    both were closed."""
    model = FAMILIES[name].build()
    ropes = rotary_embeddings(model)
    kinds = [type(rope) for rope in ropes]
    first, second = RowRopes(ropes), RowRopes(ropes)
    rows = [7, 8, 8, 9, 300]
    for rope in ropes:
        x = mx.random.normal((1, 2, 5, 16), key=mx.random.key(1))
        turned = rope(x, offset=RowPositions(rows))
        for row, position in enumerate(rows):
            close(turned[:, :, row : row + 1], rope(x[:, :, row : row + 1], offset=position), tolerance=1e-6)
        close(rope(x, offset=7), rope(x, 7))
    first.close()
    assert [type(rope) for rope in ropes] != kinds
    second.close()
    assert [type(rope) for rope in ropes] == kinds


@pytest.mark.parametrize("option", OPTIONS)
def test_the_walk_equals_the_reference(option: str) -> None:
    """Fault: draws or penalties of a row follow its number instead of its depth and ancestors."""
    rng = np.random.default_rng(3)
    for temperature in (0.0, 0.9):
        params = with_option(option, temperature=temperature, max_new_tokens=40, seed=5)
        reference, acceptor = ReferenceAcceptor(params, (3, 1, 4)), MLXAcceptor(params, (3, 1, 4), 12)
        for _ in range(6):
            proposal = random_tree(rng, int(rng.integers(0, 30)))
            logits = rng.normal(size=(len(proposal.tokens) + 1, 12)).astype(np.float32)
            expected = reference.accept(proposal, Verdict(logits))
            assert acceptor.accept(proposal, Verdict(mx.array(logits))) == expected


def test_a_near_tie_off_the_first_branch_is_judged_again() -> None:
    """Fault: rounding decides a token of a branch, which a row of its own would have decided otherwise."""
    tree = Proposal.tree((1, 2, 3), (0, 0, 2))
    for dtype, near, apart in ((mx.float32, 1e-6, 1e-3), (mx.bfloat16, 0.0625, 1.0)):
        for gap, expected in ((near, Acceptance((0,), 2)), (apart, Acceptance((0, 2, 3), 4))):
            logits = np.full((4, 6), -4.0, np.float32)
            logits[[0, 2, 3], [2, 3, 4]] = 8.0
            logits[2, 5] = 8.0 - gap
            found = MLXAcceptor(SamplingParams(), (), 6).accept(tree, Verdict(mx.array(logits).astype(dtype)))
            assert found == expected
    logits[0, 5] = logits[0, 2]  # the anchor's own row is where a chain's would be
    assert MLXAcceptor(SamplingParams(), (), 6).accept(tree, Verdict(mx.array(logits))).path == (0, 2, 3)


@pytest.mark.parametrize("option", OPTIONS)
def test_drawn_chains_and_chances_equal_the_reference(option: str) -> None:
    """Fault: p/q or the residual of other rows, draws shared with the target's own, chances before the filters."""
    rng = np.random.default_rng(4)
    params = with_option(option, temperature=0.9, seed=6)
    reference, acceptor = ReferenceAcceptor(params, (3, 1)), MLXAcceptor(params, (3, 1), 8)
    lengths = set()
    for _ in range(60):
        logits = rng.normal(size=(4, 8)).astype(np.float32)
        drawn_from: list[DrawnFrom | None] = []
        drafted: list[int] = []
        for row in logits[:3]:
            ids, probs = rng.permutation(8)[:4], rng.dirichlet(np.ones(4))
            is_drawn = rng.random() < 0.7
            drafted.append(int(rng.choice(ids, p=probs)) if is_drawn else int(row.argmax()))
            drawn_from.append(DrawnFrom(tuple(ids.tolist()), tuple(probs.tolist())) if is_drawn else None)
        proposal = Proposal(tuple(drafted), drawn_from=tuple(drawn_from), asked=((0, 3), (1,), (), (2, 4, 6)))
        expected = reference.accept(proposal, Verdict(logits))
        actual = acceptor.accept(proposal, Verdict(mx.array(logits)))
        assert (actual.path, actual.next_token) == (expected.path, expected.next_token)
        for ours, theirs in zip(actual.chances, expected.chances, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6)
        lengths.add(actual.num_accepted)
    assert lengths == {0, 1, 2, 3}
