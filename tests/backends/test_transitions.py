"""Candidates with transitions: every number against the slow specification, and the greedy chain at their head."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from dflash.backends.torch.drafters import transitions
from dflash.backends.torch.drafters.block import BlockDrafter
from dflash.backends.torch.drafters.dspark import DSparkDrafter
from dflash.backends.torch.target import TorchTarget
from dflash.registry import DRAFTERS, load_attribute
from tests.backends import slow_draft
from tests.backends.test_draft_networks import BASE, KINDS, MASK, ids_of, network, random, specified
from tests.backends.tiny_targets import llama, tokens

H, ANCHOR = 96, 17


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    return TorchTarget(llama(), taps=(0, 2))


def log_softmax(x: slow_draft.Array) -> slow_draft.Array:
    high = x.max()
    return np.asarray(x - high - np.log(np.exp(x - high).sum()))


def after(kind: str, draft: Any, states: Any, logits: Any, slot: int, before: int) -> slow_draft.Array:
    """Log-probabilities [rows] of a slot after a token, by the specification (heads without a memory)."""
    w, u = slow_draft.weights_of(draft.state_dict()), logits[slot].copy()
    if kind.startswith("dspark"):
        code = w["markov_head.markov_w1.weight"][before]
        if draft.config.markov_head == "gated":
            gate = w["markov_head.gate_proj.weight"] @ np.concatenate([states[slot], code])
            code = slow_draft.sigmoid(gate + w["markov_head.gate_proj.bias"]) * code
        return log_softmax(u + w["markov_head.markov_w2.weight"] @ code)
    name = "candidate_selector."
    scored = np.argsort(-u)[: draft.config.selector_top_k]
    code = w[name + "predecessor_codebook"][before] * (w[name + "hidden_projection.weight"] @ states[slot])
    u[scored] += w[name + "successor_codebook"][scored] @ code
    return log_softmax(u)


@pytest.mark.parametrize("kind", ["dflash2", "dspark vanilla", "dspark gated", "dspark rnn", "dspark, reduced"])
def test_transitions_are_those_of_the_specification(kind: str, target: TorchTarget) -> None:
    """Guards against trees that put right tokens under wrong parents: the whole table, and its greedy chain."""
    config = dataclasses.replace(BASE, **KINDS[kind])
    draft = network(config, seed=4)
    if config.draft_vocab_size is not None:
        draft.vocabulary = (*range(0, 76, 2), MASK, 95)
    shared: BlockDrafter = load_attribute(DRAFTERS[config.kind])(draft, target)
    features, ids = random(20, 2 * H), ids_of(draft)
    session = shared.session()
    session.observe(tokens(20), features)
    with torch.inference_mode():
        hidden = session._hidden(ANCHOR)
        scored = session._logits(hidden)
        if isinstance(shared, DSparkDrafter):
            assert draft.markov_head is not None
            assert shared.markov_KR is not None
            found = transitions.markov(
                draft.markov_head, shared.markov_KR, hidden, scored, shared.token_ids_K, ANCHOR, count=4
            )
        else:
            assert draft.candidate_selector is not None
            found = transitions.selected(
                draft.candidate_selector, hidden, scored, shared.token_ids_K, ANCHOR, num_scored=7, count=4
            )
    picked = shared.tokens(found.rows_TC).tolist()
    table = session.candidates(ANCHOR, 99, 4)
    assert table.ids == picked
    assert table.log_probs == found.log_probs_TC.tolist()
    assert table.transitions == found.after_SCC.tolist()
    assert session.candidates(ANCHOR, 2, 4).ids == picked[:2]
    assert session.candidates(ANCHOR, 1, 4).transitions == []
    assert tuple(row[0] for row in picked) == session.propose(ANCHOR, 99).tokens
    assert all(list(row) == sorted(row, reverse=True) for row in found.log_probs_TC.tolist())
    states, logits = specified(draft, target, features, ANCHOR)
    logits[:, ids.index(MASK)] = -np.inf
    if kind == "dspark rnn":
        return  # its memory is that of the chain: the chain itself is the claim
    place = {token: row for row, token in enumerate(ids)}
    for slot, row in enumerate(picked):
        befores = [ANCHOR] if slot == 0 else picked[slot - 1]
        given = found.log_probs_TC[:1] if slot == 0 else found.after_SCC[slot - 1]
        for a, before in enumerate(befores):
            expected = after(kind, draft, states, logits, slot, before)[[place[token] for token in row]]
            np.testing.assert_allclose(given[a].numpy(), expected, rtol=1e-3, atol=1e-3)
    assert not np.allclose(found.after_SCC[0][0], found.after_SCC[0][1]), "predecessors must matter"
