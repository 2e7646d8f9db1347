"""Attention of few rows: the heads of a group together give what each alone does, and a row's bits stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DogeConfig, DogeForCausalLM

from dflash.backends.torch.attention import KERNEL_BLOCK, LEAST_ROWS, MOST_HEADS, MOST_ROWS, AttentionForm, attend
from dflash.backends.torch.target import TorchTarget
from dflash.types import Proposal

KEYS, WIDTH, START = 64, 16, 40
SCALE = 0.3


def parts(num_rows: int, group: int, *, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value; the rows of a narrow query are the first of a wider one."""
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, rows: int) -> Tensor:
        return torch.randn(batch, heads, rows, WIDTH, generator=generator)

    key, value = random(2, KEYS), random(2, KEYS)
    return random(2 * group, KERNEL_BLOCK)[:, :, :num_rows], key, value


def causal(num_rows: int, *, bools: bool = False) -> Tensor:
    """[1, 1, num_rows, KEYS] of rows behind START keys."""
    seen = (torch.arange(KEYS) <= START + torch.arange(num_rows)[:, None])[None, None]
    return seen if bools else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def attended(num_rows: int, group: int, form: AttentionForm, *, batch: int = 1, bools: bool = False) -> Tensor:
    """As a forward of exact mode does it."""
    mask = form.mask(causal(form.num_rows(num_rows, exact=True), bools=bools))
    return attend(*parts(num_rows, group, batch=batch), mask, SCALE)


@pytest.mark.parametrize("bools", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7])
def test_equals_the_definition(group: int, batch: int, bools: bool) -> None:
    """Fault: a head reads another one's keys, a row another one's mask, or padding stays in."""
    for num_rows in (1, 2, 5, 8, 11, 16):
        query, key, value = parts(num_rows, group, batch=batch)
        scores = SCALE * query @ key.repeat_interleave(group, dim=1).transpose(-1, -2)
        mask = causal(num_rows, bools=bools)
        scores = scores.masked_fill(~mask, -torch.inf) if bools else scores + mask
        expected = scores.softmax(-1) @ value.repeat_interleave(group, dim=1)
        for form in (AttentionForm(), AttentionForm.on_cpu(group), AttentionForm.on_cpu(1)):
            found = attended(num_rows, group, form, batch=batch, bools=bools)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", range(1, MOST_HEADS + 3))
def test_a_row_has_the_same_bits_in_every_width(group: int) -> None:
    """Fault: one to three rows are left to a block of the kernel, which sums them in an order of their own."""
    form = AttentionForm.on_cpu(group)
    assert form.group == (group if 1 < group <= MOST_HEADS else 1)
    widest = attended(KERNEL_BLOCK, group, form)
    for num_rows in range(1, KERNEL_BLOCK):
        assert torch.equal(attended(num_rows, group, form), widest[:, :, :num_rows]), num_rows


def test_rows_of_the_kernel() -> None:
    """Fault: blocks end in one to three rows, rows are dropped, or more are added than that takes."""
    for group in range(1, MOST_HEADS + 1):
        form = AttentionForm.on_cpu(group)
        assert group * form.num_rows(KERNEL_BLOCK, exact=True) <= MOST_ROWS
        for width in range(1, KERNEL_BLOCK + 1):
            assert form.num_rows(width, exact=False) == width
            num_rows = form.num_rows(width, exact=True)
            assert width <= num_rows <= width + 3
            assert num_rows == 1 < form.group or form.group * num_rows % KERNEL_BLOCK not in range(1, LEAST_ROWS)


def test_masks_of_other_makes_are_left_alone() -> None:
    """Fault: a mask per query head, or one made for a layer with other heads, is taken for copies of one."""
    query, key, value = parts(5, 4)
    per_head = torch.randn(1, 8, 5, KEYS)
    scores = SCALE * query @ key.repeat_interleave(4, dim=1).transpose(-1, -2) + per_head
    expected = scores.softmax(-1) @ value.repeat_interleave(4, dim=1)
    torch.testing.assert_close(attend(query, key, value, per_head, SCALE), expected, rtol=1e-5, atol=1e-5)
    only = (query[:, :, :1], key[:, :1], value[:, :1])  # one key/value head: a mask per head looks like copies
    scores = SCALE * only[0][:, :4] @ only[1].transpose(-1, -2) + per_head[:, :4, :1]
    expected = scores.softmax(-1) @ only[2]
    found = attend(only[0][:, :4], *only[1:], per_head[:, :4, :1], SCALE)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    copies = AttentionForm(group=3).mask(causal(5))
    one = attend(query, key, value, causal(5), SCALE)
    assert torch.equal(attend(query, key, value, copies, SCALE), one)


@pytest.mark.parametrize("bools", [False, True])
@pytest.mark.parametrize("mask_heads", [2, 3, 5, 16])
def test_masks_that_fit_no_head_are_refused(mask_heads: int, bools: bool) -> None:
    """Fault: of a mask for other heads than there are, the first head's is taken for all."""
    query, key, value = parts(5, 4)
    mask = causal(5, bools=bools).repeat(1, mask_heads, 1, 1)
    mask[:, -1, :, 0] = False if bools else -torch.inf
    with pytest.raises(RuntimeError):
        attend(query, key, value, mask, SCALE)


@pytest.mark.parametrize("heads", [6, 8])
def test_models_that_compute_with_the_mask_get_one_per_head(heads: int) -> None:
    """Fault: Doge adds the mask to one of its own per key/value head, which copies for a group do not fit."""
    config = DogeConfig(
        vocab_size=97, hidden_size=48, intermediate_size=48, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=heads // 2, max_position_embeddings=128,
    )  # fmt: skip
    target = TorchTarget(DogeForCausalLM(config))
    assert target.attention.group == 1
    session = target.session(exact=False)
    session.prefill([1, 2, 3])
    assert session.verify(4, Proposal((5, 6))).logits.shape == (3, 97)
    session.close()
    target.close()


def test_too_many_rows_go_apart() -> None:
    """Fault: a wide tree makes a mask that the kernel takes in blocks of another size."""
    form = AttentionForm.on_cpu(4)
    assert form.mask(causal(47)).shape[1] == 4
    assert form.mask(causal(48)).shape[1] == 1
