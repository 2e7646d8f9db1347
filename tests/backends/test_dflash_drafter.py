"""The DFlash drafter as a session: what it proposes, what it remembers, and that it equals the training forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.drafters.dflash import DFlashDrafter, DFlashSession
from dflash.backends.torch.target import TorchTarget
from dflash.core.draft_config import DraftConfig
from dflash.train.anchors import Blocks
from dflash.train.step import collate, forward_blocks
from tests.backends.tiny_pair import random_draft
from tests.backends.tiny_targets import VOCAB_SIZE, llama, tokens

MASK, BLOCK, TAPS = 90, 6, (0, 2)


def draft(model: PreTrainedModel, **changes: Any) -> DraftModel:
    values: dict[str, Any] = {
        "hidden_size": model.config.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB_SIZE,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": TAPS,
    }
    network = random_draft(DraftConfig(**(values | changes))).eval()
    with torch.no_grad():  # a fresh network hardly looks at its context; this one does
        for name, parameter in network.named_parameters():
            if name.endswith(("q_norm.weight", "v_proj.weight", "o_proj.weight")):
                parameter.mul_(5)
    return network


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def drafter(model: PreTrainedModel, network: DraftModel | None = None) -> DFlashDrafter:
    return DFlashDrafter(network or draft(model), TorchTarget(model, taps=TAPS))


def features(num_rows: int, width: int = 192, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


def observed(shared: DFlashDrafter, rows: Tensor, pieces: Sequence[int]) -> DFlashSession:
    """A session that was shown `rows` in pieces of these sizes."""
    session, start = shared.session(), 0
    assert sum(pieces) == len(rows)
    for size in pieces:
        session.observe(tokens(size), rows[start : start + size])
        start += size
    return session


def trained_logits(shared: DFlashDrafter, rows: Tensor, anchor_id: int, model: PreTrainedModel) -> Tensor:
    """Logits of slots 1.. of the block at position len(rows), by the training forward (rows behind it included)."""
    n = len(rows)
    more = torch.cat([rows, features(4, seed=9)])
    ids = np.zeros(len(more), dtype=np.int64)
    ids[n] = anchor_id
    slots = np.zeros((1, BLOCK - 1), dtype=np.int64)
    batch = collate([more], [ids], [Blocks(np.array([n]), slots, slots.astype(np.bool_))])
    embedding: Any = model.get_input_embeddings()
    with torch.no_grad():
        hidden = forward_blocks(shared.network, batch, embedding.weight)[0, 0, 1:]
        logits: Tensor = hidden @ model.get_output_embeddings().weight.T
    return logits


@pytest.mark.parametrize("pieces", [[13], [1] * 13, [5, 1, 6, 1]])
def test_proposal_is_the_arg_max_of_the_training_forward(model: PreTrainedModel, pieces: list[int]) -> None:
    """Guards against a decode path that differs from what was trained: cache filled in any pieces."""
    shared, rows = drafter(model), features(13)
    session = observed(shared, rows, pieces)
    expected = trained_logits(shared, rows, 17, model)
    expected[:, MASK] = -torch.inf
    assert list(session.propose(17, BLOCK - 1).tokens) == expected.argmax(-1).tolist()


def test_block_rows_never_stay(model: PreTrainedModel) -> None:
    """Guards against keys of an earlier block in the context: proposing twice, or proposing between observations,
    changes nothing."""
    shared, rows = drafter(model), features(20)
    plain = observed(shared, rows, [20]).propose(3, 5)
    session = shared.session()
    for start in range(0, 20, 4):
        session.observe(tokens(4), rows[start : start + 4])
        session.propose(50 + start, 5)
        last = session.propose(3, 5)
    assert last == plain


def test_context_matters(model: PreTrainedModel) -> None:
    """Guards against tests that chance passes: other features, another anchor or another position change proposals."""
    shared, rows = drafter(model), features(20)
    base = observed(shared, rows, [20]).propose(3, 5)
    others = [
        observed(shared, features(20, seed=1), [20]).propose(3, 5),
        observed(shared, rows, [20]).propose(4, 5),
        observed(shared, rows.flip(0), [20]).propose(3, 5),
    ]
    assert all(other != base for other in others)


def test_growth_beyond_the_first_bucket(model: PreTrainedModel) -> None:
    """Guards against lost rows when the storage of 512 rows grows, in one step or row by row at the border."""
    shared, rows = drafter(model), features(1100)
    for num_rows in (505, 506, 507, 512, 513, 1030, 1100):
        expected = trained_logits(shared, rows[:num_rows], 17, model)
        expected[:, MASK] = -torch.inf
        for pieces in ([num_rows], [500, *([1] * 8), num_rows - 508] if num_rows > 508 else [500, num_rows - 500]):
            session = observed(shared, rows[:num_rows], pieces)
            assert list(session.propose(17, 5).tokens) == expected.argmax(-1).tolist()


def test_sessions_do_not_share_state(model: PreTrainedModel) -> None:
    """Guards against a second request reading the first one's context."""
    shared = drafter(model)
    first = observed(shared, features(9), [9])
    before = first.propose(5, 5)
    observed(shared, features(30, seed=4), [30]).propose(6, 5)
    assert first.propose(5, 5) == before


@pytest.mark.parametrize("budget", [1, 2, 5, 9])
def test_budget_cuts_the_proposal_and_not_the_block(model: PreTrainedModel, budget: int) -> None:
    """Guards against a shorter block near the limit: the draft was trained at full width, so the first tokens must be
    those of the full proposal."""
    session = observed(drafter(model), features(9), [9])
    full = session.propose(5, BLOCK - 1)
    assert session.max_proposal == BLOCK - 1
    assert session.propose(5, budget).tokens == full.tokens[:budget]


def loving(model: PreTrainedModel, token: int) -> PreTrainedModel:
    """A copy of `model` whose head gives `token` by far the largest logits: its row is the sum of many others."""
    copy = llama()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        copy.lm_head.weight = torch.nn.Parameter(copy.lm_head.weight.clone())
        copy.lm_head.weight[token] = 0
    return copy


@pytest.mark.parametrize("vocabulary", [None, (3, 8, 40, MASK, 95)])
def test_the_mask_id_is_never_proposed(model: PreTrainedModel, vocabulary: tuple[int, ...] | None) -> None:
    """Guards against proposals that fill the text with masks: a head in which every other token has a negative
    logit for these states, so that without the ban every slot would say mask."""
    network = draft(model, draft_vocabulary_file="ids.json" if vocabulary else None)
    network.vocabulary = vocabulary
    biased = loving(model, MASK)
    rows = features(9)
    with torch.no_grad():  # all other rows point away from every slot's state
        hidden = trained_logits_states(drafter(biased, network), rows, biased)
        biased.lm_head.weight.copy_(-hidden.mean(0).expand_as(biased.lm_head.weight) - 0.01 * biased.lm_head.weight)
        biased.lm_head.weight[MASK] = hidden.mean(0)
    shared = drafter(biased, network)
    assert trained_logits(shared, rows, 17, biased).argmax(-1).tolist() == [MASK] * 5, "the trap must be one"
    proposal = observed(shared, rows, [9]).propose(17, 5).tokens
    assert MASK not in proposal
    assert vocabulary is None or set(proposal) <= set(vocabulary)


def trained_logits_states(shared: DFlashDrafter, rows: Tensor, model: PreTrainedModel) -> Tensor:
    """Final states of the slots (the logits of an identity head)."""
    head, model.lm_head.weight = model.lm_head.weight, torch.nn.Parameter(torch.eye(rows.shape[1] // 2))
    states = trained_logits(shared, rows, 17, model)
    model.lm_head.weight = head
    return states


def test_a_draft_vocabulary_restricts_and_maps(model: PreTrainedModel) -> None:
    """Guards against row numbers of the reduced head given out as token ids."""
    ids = (3, 8, 40, 41, 77, 95)
    network = draft(model, draft_vocabulary_file="ids.json")
    network.vocabulary = ids
    shared, rows = drafter(model, network), features(13)
    logits = trained_logits(shared, rows, 17, model)
    expected = [ids[i] for i in logits[:, list(ids)].argmax(-1).tolist()]
    assert list(observed(shared, rows, [13]).propose(17, 5).tokens) == expected


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16])
def test_dtypes_are_cast_at_the_border(target_dtype: torch.dtype, draft_dtype: torch.dtype) -> None:
    """Guards against a crash or noise when target and draft compute in different types."""
    exact = llama()
    network = draft(exact)
    expected = observed(drafter(exact, network), features(13), [13]).propose(17, 5).tokens
    rough = cast(llama(), target_dtype)
    shared = drafter(rough, draft(exact).to(draft_dtype))
    proposal = observed(shared, features(13).to(target_dtype), [13]).propose(17, 5).tokens
    assert len(proposal) == 5
    if target_dtype == draft_dtype == torch.float32:
        assert proposal == expected


def test_huge_features_stay_finite() -> None:
    """Guards against a float16 target's outliers overflowing in the fusion: the draft stays in float32."""
    model = cast(llama(), torch.float16)
    shared = drafter(model, draft(llama()))
    session = observed(shared, (features(13) * 1e4).half(), [13])
    again = observed(shared, (features(13) * 5e3).half(), [13])
    assert session.propose(17, 5) == again.propose(17, 5), "the fusion is normed, so the scale must not matter"


def test_features_are_needed(model: PreTrainedModel) -> None:
    """Guards against a drafter that silently drafts without the target's features."""
    with pytest.raises(AssertionError):
        drafter(model).session().observe([1, 2], None)
