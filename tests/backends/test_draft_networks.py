"""Networks and drafters of every kind against the slow specification (`slow_draft.py`), with random weights.

All weights are random and far from their starting values, so that a part that is left out, swapped or shifted shows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash.backends.torch import half, packing
from dflash.backends.torch.draft_attention import rotary_tables
from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.drafters.block import BlockDrafter, BlockSession
from dflash.backends.torch.drafters.dspark import DSparkSession
from dflash.backends.torch.sampling import TorchAcceptor
from dflash.backends.torch.target import TorchTarget
from dflash.core.draft_config import DraftConfig, LayerAttention, Yarn
from dflash.core.draft_tensors import expected_tensors
from dflash.core.loop import speculative_rounds
from dflash.core.stopping import StopRule
from dflash.registry import DRAFTERS, load_attribute
from dflash.types import SamplingParams
from tests.backends import slow_draft
from tests.backends.tiny_targets import VOCAB_SIZE, llama, tokens

MASK, BLOCK, TAPS, H = 90, 6, (0, 2), 96
WINDOW = LayerAttention(window=8)
CAUSAL_WINDOW = LayerAttention(window=8, causal=True)
FULL = LayerAttention()

BASE = DraftConfig(
    hidden_size=H,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    vocab_size=VOCAB_SIZE,
    block_size=BLOCK,
    mask_token_id=MASK,
    target_layer_ids=TAPS,
)
CONVOLVED: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 16}
SELECTING: dict[str, Any] = {"selector_rank": 12, "selector_top_k": 7}
SPARK: dict[str, Any] = {"markov_rank": 12, "markov_head": "vanilla", "anchor_predicts": True}
CONFIDENT: dict[str, Any] = {"confidence_head": True, "confidence_with_markov": True}
OWN: dict[str, Any] = {"owns_embedding": True, "owns_head": True}

BACKBONES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"layer_attention": (WINDOW, FULL)},
    "causal window": {"layer_attention": (CAUSAL_WINDOW, CAUSAL_WINDOW)},
    "causal": {"layer_attention": (FULL, LayerAttention(causal=True))},
    "window from anchor": {"layer_attention": (CAUSAL_WINDOW, WINDOW), "window_from_anchor": True},
    "sinks": {"layer_attention": (LayerAttention(sinks=True), LayerAttention(window=8, causal=True, sinks=True))},
    "biases": {"attention_bias": True},
    "two bases": {"layer_attention": (WINDOW, FULL), "sliding_rope_theta": 100.0},
    "yarn": {
        "yarn": Yarn(factor=4.0, original_max_position_embeddings=8, attention_factor=1.2, beta_fast=1.0, beta_slow=0.1)
    },
    "neighbouring pairs": {"rope_interleaved": True},
    "convolutions": CONVOLVED,
    "three taps of convolution": {"conv_kernel_size": 3, "conv_group_size": 32},
    "scaled input": {"input_embedding_scale": 3.0},
}


def network(config: DraftConfig, seed: int = 1) -> DraftModel:
    """Random weights, none at a value that would hide a part: norms off one, convolutions and codes off zero."""
    draft = DraftModel(config).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in draft.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(1 + 0.3 * noise)
        elif name.endswith(("bias", "sink_bias", "base_kernel")):
            parameter.copy_(0.7 * noise)
        elif "codebook" in name or "markov_w" in name:
            parameter.copy_(noise)
        elif "embed_tokens" in name:  # small, so that what the layers add decides
            parameter.copy_(0.02 * noise)
        else:
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    return draft


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decoding(draft: DraftModel, monkeypatch: pytest.MonkeyPatch, *, room: bool) -> DraftModel:
    """`draft` with its layers joined, and packed if there is room; its state dict stays what it was."""
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    if not room:
        monkeypatch.setattr(packing, "available_bytes", lambda: 1)
    draft.for_decoding()
    after = draft.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    kinds = {type(module) for module in draft.modules()}
    assert bool(kinds & {packing.PackedLinear, half.HalfLinear}) == (room and packing.can_pack())
    return draft


@pytest.mark.parametrize("form", ["apart", "joint", "joint and packed", "joint and halved"])
@pytest.mark.parametrize("case", BACKBONES)
@torch.no_grad()
def test_the_network_is_the_specification(case: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against every reading of window, causality, sinks, biases, rotary and convolution but the stated one: the
    training form with three blocks at once, and the inference form with room behind the context; layers apart as in
    training, and joined as in decoding."""
    config = dataclasses.replace(BASE, **BACKBONES[case])
    draft = network(config)
    if form == "joint and halved":  # as published: numbers that bfloat16 stores
        draft.bfloat16().float()
    if form != "apart":
        decoding(draft, monkeypatch, room=form != "joint")
        assert any(isinstance(module, half.HalfLinear) for module in draft.modules()) == (
            form == "joint and halved" and half.can_multiply()
        )
    anchors = [0, 5, 19]
    features, embedded = random(20, 2 * H), random(3, BLOCK, H, seed=1)
    weights = slow_draft.weights_of(draft.state_dict())
    positions = torch.arange(20)[None]
    at = torch.tensor([anchors])
    bias = torch.zeros(1, 3, 20).masked_fill(positions >= at[..., None], -torch.inf)
    trained = draft(embedded[None], at, draft.project_context(features[None], positions), bias)[0]
    for number, anchor in enumerate(anchors):
        expected = slow_draft.block_states(
            config, weights, features.double().numpy(), embedded[number].double().numpy(), anchor
        )
        np.testing.assert_allclose(trained[number].numpy(), expected, rtol=2e-4, atol=2e-4)
        alone = draft.project_context(features[None, :anchor], positions[:, :anchor])
        inferred = draft(embedded[None, number : number + 1], torch.tensor([[anchor]]), alone)[0, 0]
        np.testing.assert_allclose(inferred.numpy(), expected, rtol=2e-4, atol=2e-4)


def test_the_cases_differ() -> None:
    """Guards against a specification and a network that both ignore a setting."""
    features, embedded = random(20, 2 * H).double().numpy(), random(BLOCK, H, seed=1).double().numpy()
    for case, changes in BACKBONES.items():
        if case in ("plain", "biases", "sinks") or "conv" in case:
            continue  # these have further weights
        config = dataclasses.replace(BASE, **changes)
        weights = slow_draft.weights_of(network(BASE).state_dict())
        plain = slow_draft.block_states(BASE, weights, features, embedded, 19)
        assert np.abs(slow_draft.block_states(config, weights, features, embedded, 19) - plain).max() > 1e-2, case


def test_yarn_is_that_of_transformers() -> None:
    """Guards against a specification that shares the network's misreading: the same table from another program."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 32.0, "original_max_position_embeddings": 8192}
    theirs = Qwen3RotaryEmbedding(Qwen3Config(head_dim=128, rope_parameters=rope, max_position_embeddings=262144))
    positions = torch.tensor([[0, 1, 700, 9000, 250_000]])
    cos, sin = theirs(torch.zeros(1), positions)
    yarn = Yarn(factor=32.0, original_max_position_embeddings=8192, attention_factor=0.1 * np.log(32) + 1)
    ours = rotary_tables(positions, 128, 1e6, torch.float32, yarn=yarn)
    torch.testing.assert_close(ours.cos, cos, rtol=1e-4, atol=2e-2)  # float32 angles of large positions
    torch.testing.assert_close(ours.cos[:, :3], cos[:, :3], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ours.sin[:, :3], sin[:, :3], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        *BACKBONES.values(),
        CONVOLVED | SELECTING,
        SPARK | CONFIDENT | OWN,
        SPARK | {"markov_head": "gated"},
        SPARK | {"markov_head": "rnn", "confidence_head": True},
        OWN | {"draft_vocab_size": 40},
    ],
)
def test_the_list_of_tensors_is_that_of_the_network(changes: dict[str, Any]) -> None:
    """Guards against a check of checkpoints (core) that no longer describes what is loaded (backend)."""
    config = dataclasses.replace(BASE, **changes)
    held = {name: tuple(value.shape) for name, value in DraftModel(config).state_dict().items()}
    assert held == dict(expected_tensors(config))


def test_a_warm_started_dflash2_is_v1_bit_for_bit() -> None:
    """Guards against a start that is worse than its source: fresh convolutions and codes change nothing at all."""
    plain = network(BASE)
    second = DraftModel(dataclasses.replace(BASE, **CONVOLVED, **SELECTING)).requires_grad_(False).eval()
    missing, unexpected = second.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all("conv" in name or "selector" in name for name in missing)
    features, embedded, position = random(1, 20, 2 * H), random(1, 1, BLOCK, H, seed=1), torch.tensor([[20]])
    states = [d(embedded, position, d.project_context(features, torch.arange(20)[None])) for d in (plain, second)]
    assert torch.equal(*states)
    target = TorchTarget(llama(), taps=TAPS)
    proposals = [session_of(d, target, features[0]).propose(17, 5) for d in (plain, second)]
    assert proposals[0] == proposals[1]


# --- drafters ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    return TorchTarget(llama(), taps=TAPS)


def session_of(draft: DraftModel, target: TorchTarget, features: Tensor) -> BlockSession:
    shared: BlockDrafter = load_attribute(DRAFTERS[draft.config.kind])(draft, target)
    session = shared.session()
    for start in range(0, len(features), 7):
        session.observe(tokens(len(features[start : start + 7])), features[start : start + 7])
    return session


def specified(
    draft: DraftModel, target: TorchTarget, features: Tensor, anchor: int
) -> tuple[np.ndarray[Any, Any], Any]:
    """States and logits of the predicting slots by the specification."""
    config, weights = draft.config, slow_draft.weights_of(draft.state_dict())
    embedding = weights.get("embed_tokens.weight", target.embed_weight.detach().double().numpy())
    head = weights.get("lm_head.weight", target.head_weight.detach().double().numpy())
    if draft.vocabulary is not None and len(head) == config.vocab_size:
        head = head[list(draft.vocabulary)]
    block = embedding[[anchor] + [MASK] * (BLOCK - 1)]
    states = slow_draft.block_states(config, weights, features.double().numpy(), block, len(features))
    states = states if config.anchor_predicts else states[1:]
    return states, slow_draft.logits_of(config, states, head)


def ids_of(draft: DraftModel) -> list[int]:
    return list(draft.vocabulary) if draft.vocabulary is not None else list(range(VOCAB_SIZE))


KINDS: dict[str, dict[str, Any]] = {
    "v1": {},
    "v1, anchor predicts": {"anchor_predicts": True},
    "v1, long behind its window": {"layer_attention": (CAUSAL_WINDOW, WINDOW)},
    "v1, window from anchor": {"layer_attention": (CAUSAL_WINDOW, CAUSAL_WINDOW), "window_from_anchor": True},
    "v1, own embedding and head": OWN,
    "v1, cap and multiplier": {"output_multiplier": 0.25, "final_logit_softcapping": 3.0},
    "dflash2": CONVOLVED | SELECTING,
    "dflash2, capped": CONVOLVED | SELECTING | {"output_multiplier": 0.5, "final_logit_softcapping": 2.0},
    "dflash2 without a selector": CONVOLVED,
    "dspark vanilla": SPARK | CONFIDENT,
    "dspark gated": SPARK | {"markov_head": "gated"} | OWN,
    "dspark rnn": SPARK | {"markov_head": "rnn", "confidence_head": True},
    "dspark, anchor only": SPARK | {"anchor_predicts": False},
    "dspark, reduced": SPARK | CONFIDENT | OWN | {"draft_vocab_size": 40},
    "dflash, reduced": OWN | {"draft_vocab_size": 40},
}


@pytest.mark.parametrize("kind", KINDS)
def test_proposals_are_those_of_the_specification(kind: str, target: TorchTarget) -> None:
    """Guards against a head that reads the wrong slot, predecessor, rows or scale: whole proposals, token by token."""
    config = dataclasses.replace(BASE, **KINDS[kind])
    draft = network(config, seed=4)
    if config.draft_vocab_size is not None:
        draft.vocabulary = (*range(0, 76, 2), MASK, 95)
        assert len(draft.vocabulary) == config.draft_vocab_size
    weights, features = slow_draft.weights_of(draft.state_dict()), random(30, 2 * H)
    session = session_of(draft, target, features)
    ids = ids_of(draft)
    seen = set()
    for anchor in (3, 17, 60):
        states, logits = specified(draft, target, features, anchor)
        logits[:, ids.index(MASK)] = -np.inf
        trust: list[float] = []
        if config.kind == "dspark":
            expected, trust = slow_draft.markov_walk(config, weights, states, logits, anchor, ids)
        elif config.selector_rank:
            expected = slow_draft.selector_walk(weights, states, logits, anchor, config.selector_top_k)
        else:
            expected = [ids[int(row.argmax())] for row in logits]
        proposal = session.propose(anchor, 99)
        assert list(proposal.tokens) == expected
        assert len(expected) == config.max_proposal == session.max_proposal
        assert session.propose(anchor, 2).tokens == proposal.tokens[:2], "a budget cuts the proposal, not the block"
        if isinstance(session, DSparkSession):
            found = session.confidences(anchor, proposal.tokens)
            np.testing.assert_allclose(found, trust, rtol=1e-4)
        seen.add(proposal.tokens)
    assert len(seen) == 3


@pytest.mark.parametrize("kind", ["v1", "dflash2", "dspark vanilla"])
def test_the_mask_id_is_never_picked(kind: str, target: TorchTarget) -> None:
    """Guards against masks in the text, also when the head's walk would choose them: own heads that prefer the mask."""
    changes = KINDS[kind] | (OWN if kind != "dflash2" else {"owns_head": True})
    draft = network(dataclasses.replace(BASE, **changes))
    assert draft.lm_head is not None
    features = random(9, 2 * H)
    states, _ = specified(draft, target, features, 3)
    with torch.no_grad():
        draft.lm_head.weight[MASK] = 50 * torch.from_numpy(states.mean(0)).float()
    assert MASK not in session_of(draft, target, features).propose(3, 99).tokens


def test_a_frozen_copy_of_the_target_is_held_once(target: TorchTarget) -> None:
    """Guards against embedding and head held twice for drafts that carry copies, and against sharing others."""
    draft = network(dataclasses.replace(BASE, **OWN))
    assert draft.embed_tokens is not None
    assert draft.lm_head is not None
    draft.embed_tokens.weight.data = target.embed_weight.detach().clone()
    shared: BlockDrafter = load_attribute(DRAFTERS["dflash"])(draft, target)
    assert draft.embed_tokens.weight.data_ptr() == shared.embed_VH.data_ptr() == target.embed_weight.data_ptr()
    assert draft.lm_head.weight.data_ptr() == shared.head_KH.data_ptr() != target.head_weight.data_ptr()


def memoryless() -> PreTrainedModel:
    """A target whose next token depends on the current one only: attention writes nothing."""
    model = llama()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("o_proj.weight"):
                parameter.zero_()
            if name.endswith("down_proj.weight"):
                parameter.mul_(20)
    return model


def generated(
    target: TorchTarget, shared: BlockDrafter | None, prompt: list[int], limit: int = 24
) -> tuple[list[int], list[int]]:
    """Tokens, and the length of each round after the prefill."""
    params = SamplingParams(max_new_tokens=limit)
    rounds = speculative_rounds(
        target.session(features=shared is not None),
        None if shared is None else shared.session(),
        TorchAcceptor(params, prompt, target.vocab_size, target.device),
        StopRule(()),
        prompt,
        max_new_tokens=limit,
    )
    pieces = [list(step.tokens) for step in rounds]
    return [token for piece in pieces for token in piece], [len(piece) for piece in pieces[1:]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_decodes_losslessly(kind: str, target: TorchTarget) -> None:
    """Guards against a drafter whose proposals or state change the text."""
    config = dataclasses.replace(BASE, **KINDS[kind])
    draft = network(config)
    if config.draft_vocab_size is not None:
        draft.vocabulary = (*range(0, 76, 2), MASK, 95)
    prompt = tokens(11)
    plain, _ = generated(target, None, prompt)
    assert generated(target, load_attribute(DRAFTERS[config.kind])(draft, target), prompt)[0] == plain


@pytest.mark.parametrize("anchor_predicts", [True, False])
def test_a_markov_head_that_knows_the_target_has_everything_accepted(anchor_predicts: bool) -> None:
    """Guards against slots shifted by one (the classic): the head holds a memoryless target's own table, so the reading
    of the anchor that is configured must accept whole blocks, in the real loop, with the same text."""
    target = TorchTarget(memoryless(), taps=TAPS)
    changes = SPARK | {"markov_rank": VOCAB_SIZE, "anchor_predicts": anchor_predicts, "output_multiplier": 1e-6}
    draft = network(dataclasses.replace(BASE, **changes))
    session = target.session()
    after = torch.stack([logits_after(target, token) for token in range(VOCAB_SIZE)])
    session.close()
    after[:, MASK] = -1e9
    assert draft.markov_head is not None
    with torch.no_grad():
        draft.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB_SIZE))
        draft.markov_head.markov_w2.weight.copy_(after.T)
    prompt = [5, 8, 13]
    plain, _ = generated(target, None, prompt, limit=40)
    text, lengths = generated(target, load_attribute(DRAFTERS["dspark"])(draft, target), prompt, limit=40)
    assert text == plain
    assert len(set(plain)) > 3, "the text must not be one token"
    if anchor_predicts:
        assert set(lengths[:-1]) == {BLOCK + 1}, "B drafts and the bonus"
    else:  # slot 1 is told the anchor as its predecessor: the configured reading, which is right for neither position
        assert set(lengths[:-1]) == {BLOCK}


def logits_after(target: TorchTarget, token: int) -> Tensor:
    session = target.session(features=False)
    try:
        logits: Tensor = session.prefill([token]).logits[-1].clone()
    finally:
        session.close()
    return logits
