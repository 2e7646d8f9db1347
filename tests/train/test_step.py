"""One forward of training: padding, sums, the reduced head and the teacher's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.backends.torch.draft_model import DraftModel
from dflash.train.anchors import Blocks, draw_blocks
from dflash.train.step import Batch, FrozenHead, StepFigures, StepSums, collate, forward_blocks, training_sums
from tests.backends.tiny_pair import HIDDEN, draft_config, random_draft

VOCAB, MASK, BLOCK = 50, 49, 4
WIDTH = 2 * HIDDEN


def network(seed: int = 1) -> DraftModel:
    return random_draft(draft_config(vocab_size=VOCAB, mask_token_id=MASK, block_size=BLOCK), seed)


def head(vocabulary: Sequence[int] | None = None, seed: int = 0) -> FrozenHead:
    """Embedding, head and norm of an imaginary target."""
    generator = torch.Generator().manual_seed(seed)
    embed, full = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    norm = nn.RMSNorm(HIDDEN, eps=1e-6).requires_grad_(False)
    rows = torch.arange(VOCAB)
    if vocabulary is not None:
        rows = torch.full((VOCAB,), -1)
        rows[list(vocabulary)] = torch.arange(len(vocabulary))
        full = full[list(vocabulary)]
    return FrozenHead(embed, full, norm, rows)


def sequence(length: int, seed: int, num_prompt: int = 3, num_anchors: int = 5) -> tuple[Tensor, Any, Blocks]:
    """(features, token ids, blocks) of one sequence."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, MASK, length)
    mask = np.arange(length) >= num_prompt
    blocks = draw_blocks(ids, mask, block_size=BLOCK, num_anchors=num_anchors, rng=rng)
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed)), ids, blocks


def batch_of(*sequences: tuple[Tensor, Any, Blocks]) -> Batch:
    features, ids, blocks = zip(*sequences, strict=True)
    return collate(features, ids, blocks)


def sums(draft: DraftModel, batch: Batch, frozen: FrozenHead | None = None, **options: Any) -> StepSums:
    values: dict[str, Any] = {"gamma": 4.0, "distill": 0.0, "teacher_NSH": None}
    return training_sums(draft, frozen or head(), batch, **(values | options))


def gradients(draft: DraftModel, batches: Sequence[Batch], **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """(numbers summed over batches, summed gradients)."""
    draft.zero_grad()
    numbers = []
    for batch in batches:
        result = sums(draft, batch, **options)
        result.loss.backward()
        numbers.append(result.numbers())
    return torch.stack(numbers).sum(0), {n: p.grad.clone() for n, p in draft.named_parameters() if p.grad is not None}


LONG, SHORT, ONE = sequence(17, 0), sequence(8, 1), sequence(11, 2, num_anchors=1)
EMPTY = sequence(6, 3, num_prompt=5)
"""Its answer is one token: no anchor."""


def test_collated_shapes_and_padding() -> None:
    """Guards against padding blocks that have labels or see context."""
    batch = batch_of(LONG, ONE, EMPTY)
    assert batch.features_NSF.shape == (3, 17, WIDTH)
    assert batch.labels_NAT.shape == (3, 5, BLOCK - 1)
    assert batch.anchors_NA[1].tolist() == [*ONE[2].anchors_A, 0, 0, 0, 0]
    assert not batch.supervised_NAT[1, 1:].any() and not batch.supervised_NAT[2].any()
    assert not batch.visible_NAS[1, 1:].any() and not batch.visible_NAS[2].any()
    assert batch.anchor_ids_NA[0].tolist() == LONG[1][LONG[2].anchors_A].tolist()
    for j, anchor in enumerate(LONG[2].anchors_A):
        assert batch.visible_NAS[0, j].tolist() == [t < anchor for t in range(17)]


@pytest.mark.parametrize("distill", [0.0, 0.5])
def test_padded_micro_batches_equal_single_sequences(distill: float) -> None:
    """Guards against padding that changes loss or gradients: three sequences together and one by one."""
    draft = network()

    def of(*sequences: tuple[Tensor, Any, Blocks]) -> tuple[Tensor, dict[str, Tensor]]:
        batch = batch_of(*sequences)
        teacher = batch.features_NSF[..., -HIDDEN:] if distill else None
        return gradients(draft, [batch], distill=distill, teacher_NSH=teacher)

    together, all_gradients = of(LONG, SHORT, ONE)
    singles = [of(one) for one in (LONG, SHORT, ONE)]
    torch.testing.assert_close(together, torch.stack([n for n, _ in singles]).sum(0), rtol=1e-5, atol=1e-4)
    for name, value in all_gradients.items():
        torch.testing.assert_close(value, torch.stack([g[name] for _, g in singles]).sum(0), rtol=1e-4, atol=1e-4)


def test_a_sequence_without_anchors_does_no_harm() -> None:
    """Guards against NaN from fully masked rows, also through 0 * NaN in the backward pass."""
    draft = network()
    alone, expected = gradients(draft, [batch_of(LONG)])
    numbers, found = gradients(draft, [batch_of(LONG, EMPTY)])
    torch.testing.assert_close(numbers, alone, rtol=1e-5, atol=1e-4)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)
    nothing, none = gradients(draft, [batch_of(EMPTY)])
    assert nothing.tolist() == [0.0] * len(nothing)
    assert all(bool((value == 0).all()) for value in none.values())


def test_loss_is_the_weighted_cross_entropy_of_the_paper() -> None:
    """Guards against a label or weight on the wrong slot: the sum over (block, slot), written as loops."""
    draft, frozen, batch = network(), head(), batch_of(LONG)
    logits = forward_blocks(draft, batch, frozen.embed_VH)[0] @ frozen.head_KH.T
    loss = weight = 0.0
    correct, accepted = [0] * (BLOCK - 1), 0
    for j, anchor in enumerate(LONG[2].anchors_A):
        right = True
        for i in range(1, BLOCK):
            if anchor + i >= len(LONG[1]):
                right = False
                continue
            label = torch.tensor([int(LONG[1][anchor + i])])
            w = float(np.exp(-(i - 1) / 4.0))
            loss += w * float(F.cross_entropy(logits[j, i][None].detach(), label))
            weight += w
            hit = int(logits[j, i].argmax()) == int(label)
            correct[i - 1] += hit
            right = right and hit
            accepted += right
        accepted += 1
    result = sums(draft, batch, frozen)
    assert float(result.loss.detach()) == pytest.approx(loss, rel=1e-4)
    assert result.weight == pytest.approx(weight, rel=1e-6)
    assert result.correct_T.tolist() == correct
    assert result.accepted == accepted
    assert result.num_blocks == len(LONG[2].anchors_A)


def perfect(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, frozen: FrozenHead, wrong: Sequence[tuple[int, int]]
) -> None:
    """Let the network say every label but those at (block, slot index) in `wrong`."""
    rows = frozen.row_of_token_V[batch.labels_NAT].clamp(min=0)
    for block, slot in wrong:
        rows[:, block, slot] = (rows[:, block, slot] + 1) % len(frozen.head_KH)
    states = torch.linalg.pinv(frozen.head_KH.double()).T.float()[rows] * 50
    hidden = torch.cat([torch.zeros_like(states[:, :, :1]), states], dim=2)
    monkeypatch.setattr("dflash.train.step.forward_blocks", lambda *_: hidden)


def test_accepted_counts_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against counting right slots behind a wrong one: the round ends there."""
    frozen = head(vocabulary=range(30))
    ids = np.arange(12) % 25
    blocks = draw_blocks(ids, np.ones(12, dtype=bool), block_size=BLOCK, num_anchors=99, rng=np.random.default_rng(0))
    batch = batch_of((torch.zeros(12, WIDTH), ids, blocks))
    perfect(batch, monkeypatch, frozen, wrong=[(0, 0), (1, 1), (2, 2)])
    result = sums(network(), batch, frozen)
    full_or_cut = [min(4, 12 - anchor) for anchor in range(11)]
    expected = sum(full_or_cut) - 3 - 2 - 1
    assert result.accepted == expected
    figures = StepFigures.of(result.numbers())
    assert figures.expected_acceptance_length == pytest.approx(expected / 11)
    assert figures.slot_accuracy == [round(10 / 11, 4), 0.9, round(8 / 9, 4)]
    assert figures.num_labels == 11 + 10 + 9


def test_tokens_outside_the_draft_vocabulary_count_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an accuracy that a reduced head makes look better than decoding can be: such slots are not learnt
    from, but they are labels that the draft cannot say."""
    frozen = head(vocabulary=[v for v in range(MASK) if v % 5])
    ids = np.arange(20)
    blocks = draw_blocks(ids, np.ones(20, dtype=bool), block_size=BLOCK, num_anchors=99, rng=np.random.default_rng(0))
    batch = batch_of((torch.zeros(20, WIDTH), ids, blocks))
    perfect(batch, monkeypatch, frozen, wrong=[])
    result = sums(network(), batch, frozen)
    outside = sum(
        int(label) % 5 == 0
        for label, is_label in zip(batch.labels_NAT.flatten(), batch.supervised_NAT.flatten(), strict=True)
        if is_label
    )
    assert outside > 0
    assert int(result.supervised_T.sum() - result.correct_T.sum()) == outside
    assert float(result.loss.detach()) < 1e-3
    expected = sum(
        1 + next((i for i in range(min(3, 19 - a)) if (a + i + 1) % 5 == 0), min(3, 19 - a)) for a in range(19)
    )
    assert result.accepted == expected


def test_the_teacher_judges_from_the_position_before() -> None:
    """Guards against a teacher that is shifted by one: the distribution of the token at a + i comes from the target's
    state at a + i - 1. With states that say every next token for sure, distilling equals hard labels."""
    frozen, draft = head(), network()
    ids = LONG[1]
    states = torch.linalg.pinv(frozen.head_KH.double()).T.float()[torch.from_numpy(ids)]
    sure = F.normalize(states, dim=-1).roll(-1, dims=0)  # row t says the token at t + 1
    frozen.final_norm.weight.fill_(400.0)  # type: ignore[operator]
    assert (frozen.final_norm(sure) @ frozen.head_KH.T).argmax(-1)[:-1].tolist() == ids[1:].tolist()
    batch = batch_of(LONG, SHORT)
    teacher = torch.zeros(2, 17, HIDDEN)
    teacher[0] = sure
    only = batch_of(LONG)
    hard, hard_gradients = gradients(draft, [only])
    soft, soft_gradients = gradients(draft, [only], frozen=frozen, distill=1.0, teacher_NSH=teacher[:1])
    torch.testing.assert_close(soft, hard, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(soft_gradients["fc.weight"], hard_gradients["fc.weight"], rtol=1e-2, atol=1e-2)
    mixed = sums(draft, batch, frozen, distill=0.5, teacher_NSH=teacher)
    assert torch.isfinite(mixed.loss)


def test_features_reach_the_gradient() -> None:
    """Guards against features made under inference mode, which autograd refuses to save, and a frozen fusion."""
    with torch.inference_mode():
        made = LONG[0].clone()
    draft = network()
    _, found = gradients(draft, [batch_of((made, LONG[1], LONG[2]))])
    assert found.keys() == dict(draft.named_parameters()).keys()
    assert all(value.abs().max() > 0 for value in found.values())
