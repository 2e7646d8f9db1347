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


LARGEST_CHUNK = 2**26
"""Logits formed at a time (a quarter of a GiB in float32), whatever the vocabulary."""
_CHUNK_ROWS_CPU = 1024
"""Rows per chunk that stay in a processor's caches; a GPU takes as many as `LARGEST_CHUNK` allows."""


def softmax_as_is(logits: Tensor) -> Tensor:
    """Over the last dimension, in float32 inside; the result in the dtype of the logits, also under autocast."""
    return logits.softmax(-1, dtype=logits.dtype)


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        head_VH: Tensor,
        labels_R: Tensor,
        weights_R: Tensor,
        teacher_PH: Tensor | None,
        teacher_rows_R: Tensor | None,
        distill: float,
        chunk: int | None,
    ) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(hidden_RH)
        predicted = torch.empty_like(labels_R)
        total = hidden_RH.new_zeros((), dtype=torch.float32)
        most = max(1, LARGEST_CHUNK // head_VH.shape[0])
        chunk = min(chunk or (_CHUNK_ROWS_CPU if hidden_RH.device.type == "cpu" else most), most)
        for start in range(0, hidden_RH.shape[0], chunk):
            rows = slice(start, start + chunk)
            hidden = hidden_RH[rows]
            logits = hidden @ head_VH.T
            predicted[rows] = logits.argmax(-1)
            aim = head_VH[labels_R[rows]]
            if teacher_PH is not None and teacher_rows_R is not None:
                aim = aim.lerp(teacher_PH[teacher_rows_R[rows]].to(aim.dtype), distill)
            # Σ_v target_v · logit_v = hidden · Σ_v target_v · head_v, so a target is one row of H numbers, not V.
            cross = logits.float().logsumexp(-1) - (hidden.float() * aim).sum(-1)
            total += (weights_R[rows] * cross).sum()
            gradient[rows] = (softmax_as_is(logits) @ head_VH - aim) * weights_R[rows, None]
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
    teacher_PH: Tensor | None = None,  # mean row of head_VH under the target's distribution, per sequence position
    teacher_rows_R: Tensor | None = None,  # which position judges which row
    distill: float = 0.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(summed weighted loss, arg max row per supervised row). The caller divides by the sum of weights.

    Three matrices [chunk, V] exist at a time, one of them float32; `chunk` (default: what suits the device) is capped
    by their size.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _FrozenHeadLoss.apply
    return apply(hidden_RH, head_VH, labels_R, weights_R, teacher_PH, teacher_rows_R, distill, chunk)
