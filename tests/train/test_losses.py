"""The chunked loss over the frozen head against its plain form: values, gradients and arg max."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dflash.train.losses import frozen_head_loss, reference_loss

ROWS, HIDDEN, VOCAB, POSITIONS = 23, 12, 31, 9


def given(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random inputs; teacher distributions belong to fewer positions than rows."""
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(ROWS, HIDDEN, generator=generator, dtype=dtype),
        "head": torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype),
        "labels": torch.randint(VOCAB, (ROWS,), generator=generator),
        "weights": torch.rand(ROWS, generator=generator),
        "teacher": torch.randn(POSITIONS, VOCAB, generator=generator).mul(2).softmax(-1),
        "rows": torch.randint(POSITIONS, (ROWS,), generator=generator),
    }


def fast(x: dict[str, Tensor], distill: float | None, chunk: int, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, gradient of factor * loss, arg max rows)."""
    hidden = x["hidden"].clone().requires_grad_()
    means = x["teacher"].to(x["head"].dtype) @ x["head"]
    extra = {} if distill is None else {"teacher_PH": means, "teacher_rows_R": x["rows"]}
    loss, predicted = frozen_head_loss(
        hidden, x["head"], x["labels"], x["weights"], distill=distill or 0.0, chunk=chunk, **extra
    )
    (loss * factor).backward()
    assert hidden.grad is not None
    return loss.detach(), hidden.grad, predicted


def plain(x: dict[str, Tensor], distill: float | None, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    hidden = x["hidden"].clone().requires_grad_()
    teacher = None if distill is None else x["teacher"][x["rows"]]
    loss = reference_loss(hidden, x["head"], x["labels"], x["weights"], teacher, distill or 0.0)
    (loss * factor).backward()
    assert hidden.grad is not None
    return loss.detach(), hidden.grad


@pytest.mark.parametrize("distill", [None, 0.0, 0.4, 1.0])
@pytest.mark.parametrize("chunk", [1, 7, ROWS, 1024])
def test_equals_the_plain_form(distill: float | None, chunk: int) -> None:
    """Guards against a hand-written gradient or a chunk border that is wrong; hard labels, mixed and distilled."""
    x = given(torch.float32)
    loss, gradient, predicted = fast(x, distill, chunk)
    expected, expected_gradient = plain(x, distill)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)
    assert torch.equal(predicted, (x["hidden"] @ x["head"].T).argmax(-1))


def test_gradient_scales_with_what_follows() -> None:
    """Guards against a stored gradient that ignores the factor of the backward pass (loss scaling, accumulation)."""
    x = given(torch.float32)
    _, gradient, _ = fast(x, 0.4, 7, factor=-2.5)
    torch.testing.assert_close(gradient, plain(x, 0.4, factor=-2.5)[1], rtol=1e-4, atol=1e-5)


def test_numeric_gradient() -> None:
    """Guards against a plain form that shares the fast one's mistake: central differences of the value alone."""
    x = given(torch.float64)
    _, gradient, _ = fast(x, 0.4, 7)
    for row, column in [(0, 0), (5, 3), (22, 11)]:
        values = []
        for step in (0.02, -0.02):
            moved = x | {"hidden": x["hidden"].clone()}
            moved["hidden"][row, column] += step
            values.append(float(fast(moved, 0.4, 7)[0]))
        assert (values[0] - values[1]) / 0.04 == pytest.approx(float(gradient[row, column]), rel=2e-2, abs=2e-3)


def test_values_by_hand() -> None:
    """Guards against names that lie: two rows, a head of two tokens, logits (ln 3, 0), so q = (3/4, 1/4)."""
    hidden, head = torch.full((2, 1), math.log(3.0)), torch.tensor([[1.0], [0.0]])
    labels, weights = torch.tensor([0, 1]), torch.tensor([1.0, 0.5])
    hard, _ = frozen_head_loss(hidden, head, labels, weights)
    assert float(hard) == pytest.approx(-math.log(0.75) - 0.5 * math.log(0.25), rel=1e-5)
    teacher = torch.tensor([[0.5, 0.5]])
    mixed, _ = frozen_head_loss(
        hidden, head, labels, weights, teacher_PH=teacher @ head, teacher_rows_R=torch.tensor([0, 0]), distill=1.0
    )
    assert float(mixed) == pytest.approx(-1.5 * (0.5 * math.log(0.75) + 0.5 * math.log(0.25)), rel=1e-5)


def test_distillation_is_smallest_at_the_teacher() -> None:
    """Guards against a reversed divergence: with an identity head, the teacher's log-probabilities have no gradient."""
    teacher = given(torch.float32)["teacher"]
    hidden = teacher.log().clone().requires_grad_()
    labels = torch.zeros(POSITIONS, dtype=torch.long)
    loss, _ = frozen_head_loss(
        hidden,
        torch.eye(VOCAB),
        labels,
        torch.ones(POSITIONS),
        teacher_PH=teacher,  # the head is the identity
        teacher_rows_R=torch.arange(POSITIONS),
        distill=1.0,
    )
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().max() < 1e-6


def test_no_rows() -> None:
    """Guards against NaN or a crash where a micro-batch has nothing to learn (all labels outside the vocabulary)."""
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    loss, predicted = frozen_head_loss(
        hidden, torch.ones(VOCAB, HIDDEN), torch.zeros(0, dtype=torch.long), torch.zeros(0)
    )
    loss.backward()
    assert float(loss.detach()) == 0
    assert predicted.shape == (0,)


def test_bfloat16_is_summed_in_float32() -> None:
    """Guards against a softmax over thousands of tokens in bfloat16."""
    x = given(torch.float32)
    low = x | {"hidden": x["hidden"].bfloat16(), "head": x["head"].bfloat16()}
    loss, gradient, _ = fast(low, None, 7)
    assert loss.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(loss, plain(x, None)[0], rtol=2e-2, atol=0.1)


def test_logits_never_exist_in_full() -> None:
    """Guards against a vocabulary-wide matrix that autograd keeps: only [R, H] is saved."""
    x = given(torch.float32)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        frozen_head_loss(x["hidden"].requires_grad_(), x["head"], x["labels"], x["weights"], chunk=7)
    assert saved == [ROWS * HIDDEN]
