"""Layer states roll back exactly: after `commit(k)` a session equals one that was only ever fed these tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from dflash.backends.torch.compat import LayerSpec
from dflash.backends.torch.state import BUCKET, SessionCache, check_states
from dflash.backends.torch.target import TorchTarget, TorchTargetSession
from dflash.core.key_lengths import KeyLengths
from dflash.errors import UnsupportedModel
from dflash.types import Proposal
from tests.backends.tiny_targets import FAMILIES, NUM_LAYERS, llama, tokens

PROMPT = tokens(11)
BLOCK = tokens(6, seed=1)
NEXT = tokens(3, seed=2)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return FAMILIES[request.param]()


def stored(session: TorchTargetSession) -> list[torch.Tensor]:
    """Committed part of all states."""
    return [tensor for layer in session._cache.layers for tensor in layer.committed()]


@pytest.mark.parametrize("exact_width", [1, 8])
@pytest.mark.parametrize("exact", [False, True])
def test_rollback_oracle(model: PreTrainedModel, exact: bool, exact_width: int) -> None:
    """Fault: rejected or padding rows stay visible, or kept rows are lost.

    For every kept count k in 0..W: prefill P, verify W, commit k, one more step. Logits, features and stored states
    must equal a fresh run that was fed P + k tokens by prefill alone. Random weights of scale 0.2 make the logits of
    any other history differ by far more than the tolerance; the last assertion shows it.
    """
    target = TorchTarget(model, taps=(0, NUM_LAYERS - 1), exact_width=exact_width)
    for kept in range(len(BLOCK) + 1):
        session, fresh = target.session(exact=exact), target.session(exact=exact)
        session.prefill(PROMPT)
        session.verify(BLOCK[0], Proposal(tuple(BLOCK[1:])))
        session.commit(range(kept))
        fresh.prefill([*PROMPT, *BLOCK[:kept]])
        assert session.num_tokens == fresh.num_tokens == len(PROMPT) + kept
        for ours, expected in zip(stored(session), stored(fresh), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        ours_step = session.verify(NEXT[0], Proposal(tuple(NEXT[1:])))
        fresh_step = fresh.verify(NEXT[0], Proposal(tuple(NEXT[1:])))
        torch.testing.assert_close(ours_step.logits, fresh_step.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours_step.features, fresh_step.features, rtol=1e-4, atol=1e-4)
    other = target.session(exact=exact)
    other.prefill([*PROMPT, *BLOCK[:-1]])
    assert (other.verify(NEXT[0], Proposal(tuple(NEXT[1:]))).logits - ours_step.logits).abs().max() > 0.01


def test_two_rejection_patterns_give_one_state(model: PreTrainedModel) -> None:
    """Fault: a state that remembers how it was reached. The same twelve tokens are fed in rounds with different
    accepted counts and different rejected tails; one more step must agree."""
    text = tokens(12, seed=3)
    target = TorchTarget(model, exact_width=4)
    logits = []
    for pattern in ([1, 3, 5, 3], [4, 4, 2, 2], [1] * 12):
        session = target.session()
        session.prefill(PROMPT)
        fed = 0
        for kept in pattern:
            rejected = tokens(3, seed=100 + fed + kept)
            session.verify(text[fed], Proposal((*text[fed + 1 : fed + kept], *rejected)))
            session.commit(range(kept))
            fed += kept
        assert fed == len(text)
        logits.append(session.verify(NEXT[0], Proposal()).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[2], logits[0], rtol=1e-4, atol=1e-4)


def test_verify_without_commit_is_forgotten(model: PreTrainedModel) -> None:
    """Fault: the rows of a verify that nobody committed (a cancelled round) leak into the next one."""
    target = TorchTarget(model)
    session, fresh = target.session(), target.session()
    for each in (session, fresh):
        each.prefill(PROMPT)
    session.verify(BLOCK[0], Proposal(tuple(BLOCK[1:])))
    ours, expected = session.verify(NEXT[0], Proposal()), fresh.verify(NEXT[0], Proposal())
    assert torch.equal(ours.logits, expected.logits)


@pytest.mark.parametrize("exact", [False, True])
def test_growth_over_buckets_keeps_the_state(exact: bool) -> None:
    """Fault: growing loses or shifts keys, or the mask is not rebuilt for the new length. Rounds cross two bucket
    borders, once with a block that straddles one; a model without our cache must agree at the end."""
    model = llama()
    text = tokens(2 * BUCKET + 40, seed=4)
    session = TorchTarget(model, exact_width=4).session(exact=exact)
    session.prefill(text[: BUCKET - 10])
    assert session.capacity == BUCKET
    fed = BUCKET - 10
    while fed < BUCKET + 22:
        session.verify(text[fed], Proposal(tuple(text[fed + 1 : fed + 7])))
        session.commit(range(4))
        fed += 4
    assert session.capacity >= fed
    session.prefill(text[fed : 2 * BUCKET - 3])
    fed = 2 * BUCKET - 3
    verdict = session.verify(text[fed], Proposal(tuple(text[fed + 1 : fed + 6])))
    assert session.capacity >= 2 * BUCKET + 3
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([text[: fed + 6]]), use_cache=False).logits[0, fed:]
    torch.testing.assert_close(verdict.logits, expected, rtol=1e-4, atol=1e-4)


def test_keys_returned_are_whole_buckets_on_demand() -> None:
    """Fault: the shape of attention changes with every token, or returns more than the text needs."""
    cache = SessionCache([LayerSpec("DynamicLayer")], KeyLengths((8,)), bucket=8)
    cache.reserve(40)
    assert cache.begin(3, exact=False) == 3
    assert cache.begin(3, exact=True) == 8
    cache.commit(range(3))
    assert cache.begin(6, exact=True) == 16
    cache.return_at_least(41)
    assert cache.begin(1, exact=True) == 48
    assert cache.capacity >= 48


def test_reserve_grows_and_never_shrinks() -> None:
    cache = SessionCache([LayerSpec("DynamicLayer")], bucket=8)
    cache.reserve(9)
    assert cache.capacity == 16
    cache.reserve(3)
    assert cache.capacity == 16
    cache.reserve(17)
    assert cache.capacity == 24
    cache.reserve(25)
    assert cache.capacity == 40  # half as much again, in whole buckets
    cache.free()
    assert (cache.capacity, cache.num_tokens) == (0, 0)


def test_commit_of_more_rows_than_fed_is_an_error() -> None:
    """Fault: the bonus token, which is not fed yet, is counted as committed."""
    session = TorchTarget(llama(), exact_width=4).session()
    session.prefill(PROMPT)
    session.verify(BLOCK[0], Proposal((BLOCK[1],)))
    with pytest.raises(AssertionError):
        session.commit(range(3))  # two fed; the padded forward had four rows


def test_unknown_states_are_refused() -> None:
    """Fault: a state of a new kind is taken for a known one and keeps rejected rows."""
    specs = [LayerSpec("DynamicLayer"), LayerSpec("NewLayer")]
    with pytest.raises(UnsupportedModel, match="layer 1 of Model keeps its state in a NewLayer"):
        check_states(specs, "Model")
