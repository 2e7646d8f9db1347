"""Losses over the frozen head (docs/training.md; arXiv:2602.06036).

`frozen_head_loss` never keeps the logits: they are formed chunk by chunk, and the gradient with respect to the
hidden states is computed on the spot, because the head's own weights are frozen. `reference_loss` is the same
quantity written plainly; a test compares both values and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def reference_loss(
    hidden_RH: Tensor, head_VH: Tensor, labels_R: Tensor, weights_R: Tensor, teacher_RV: Tensor | None, distill: float
) -> Tensor:
    """Σ_r w_r · CE(target_r, softmax(head · h_r)), target_r = (1 - distill) · onehot(label_r) + distill · teacher_r."""
    log_q = (hidden_RH @ head_VH.T).float().log_softmax(-1)
    hard = F.one_hot(labels_R, head_VH.shape[0]).to(log_q.dtype)
    target = hard if teacher_RV is None else (1 - distill) * hard + distill * teacher_RV
    return -(weights_R * (target * log_q).sum(-1)).sum()


_LARGEST_CHUNK = 2**26
"""Logits formed at a time (a quarter of a GiB in float32), whatever the vocabulary."""


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        head_VH: Tensor,
        labels_R: Tensor,
        weights_R: Tensor,
        teacher_PV: Tensor | None,
        teacher_rows_R: Tensor | None,
        distill: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(hidden_RH)
        predicted = torch.empty_like(labels_R)
        total = hidden_RH.new_zeros((), dtype=torch.float32)
        chunk = min(chunk, max(1, _LARGEST_CHUNK // head_VH.shape[0]))
        for start in range(0, hidden_RH.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = (hidden_RH[rows] @ head_VH.T).float()
            predicted[rows] = logits.argmax(-1)
            log_q = logits.log_softmax(-1)
            labels, weights = labels_R[rows, None], weights_R[rows, None]
            cross = -log_q.gather(1, labels)
            delta = log_q.exp()
            if teacher_PV is not None and teacher_rows_R is not None:
                teacher = teacher_PV[teacher_rows_R[rows]]
                cross = (1 - distill) * cross - distill * (teacher * log_q).sum(-1, keepdim=True)
                delta.sub_(teacher, alpha=distill)
                delta.scatter_add_(1, labels, torch.full_like(cross, distill - 1))
            else:
                delta.scatter_add_(1, labels, torch.full_like(cross, -1.0))
            total += (weights * cross).sum()
            gradient[rows] = (delta.mul_(weights)).to(head_VH.dtype) @ head_VH
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(predicted)
        return total, predicted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None, None, None


def frozen_head_loss(
    hidden_RH: Tensor,  # supervised rows only
    head_VH: Tensor,  # frozen rows of the target's head (all, or the draft vocabulary)
    labels_R: Tensor,  # row numbers of head_VH
    weights_R: Tensor,  # float32
    *,
    teacher_PV: Tensor | None = None,  # the target's distribution per sequence position, over head_VH's rows
    teacher_rows_R: Tensor | None = None,  # which position judges which row
    distill: float = 0.0,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """(summed weighted loss, arg max row per supervised row). The caller divides by the sum of weights.

    Up to four float32 matrices [chunk, V] exist at a time; `chunk` shrinks for vocabularies beyond 64k rows.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _FrozenHeadLoss.apply
    return apply(hidden_RH, head_VH, labels_R, weights_R, teacher_PV, teacher_rows_R, distill, chunk)
