"""One forward of training: sequences and their blocks in, summed loss and counts out.

Knows nothing of optimizers, files or processes. Sums (not means) are returned so that micro-batches, and ranks
later, can be added before dividing: loss = Σ w·CE / Σ w over the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dflash.backends.torch.draft_model import DraftModel
from dflash.train.anchors import Blocks, slot_weights
from dflash.train.losses import LARGEST_CHUNK, frozen_head_loss, softmax_as_is


@dataclass(frozen=True)
class FrozenHead:
    """The target's parts that the draft borrows, none of them trained."""

    embed_VH: Tensor
    head_KH: Tensor
    """Rows of the head for the draft vocabulary (or all)."""
    final_norm: nn.Module
    """The target's norm before its head; turns a last-layer tap into its distribution."""
    row_of_token_V: Tensor
    """[V] row of head_KH per target id, -1 outside the draft vocabulary."""


@dataclass(frozen=True)
class StepSums:
    """Sums over supervised slots; add them up over micro-batches and processes."""

    loss: Tensor
    weight: float
    correct_T: Tensor
    """[B - 1] slots whose arg max was the label."""
    supervised_T: Tensor
    """[B - 1] slots with a label in the sequence (also outside the draft vocabulary)."""
    accepted: float
    """Σ over blocks of (1 + correct prefix length): teacher-forced acceptance lengths."""
    num_blocks: int

    def numbers(self) -> Tensor:
        """All sums in one float64 vector on the CPU: loss, weight, accepted, num_blocks, correct_T, supervised_T."""
        scalars = torch.tensor([float(self.loss.detach()), self.weight, self.accepted, self.num_blocks])
        return torch.cat([scalars.double(), self.correct_T.double().cpu(), self.supervised_T.double().cpu()])


@dataclass(frozen=True)
class StepFigures:
    """What sums over any number of micro-batches say about the draft, teacher-forced."""

    loss: float
    """Weighted mean over the slots that the draft can score."""
    expected_acceptance_length: float
    """Mean over blocks of 1 + number of leading slots that are right."""
    slot_accuracy: list[float]
    """[B - 1] share of right slots."""
    num_labels: int
    """Slots with a label."""

    @classmethod
    def of(cls, numbers: Tensor) -> StepFigures:
        """From (a sum of) `StepSums.numbers`."""
        loss, weight, accepted, blocks = numbers[:4].tolist()
        correct_T, supervised_T = numbers[4:].chunk(2)
        return cls(
            loss=loss / max(weight, 1e-8),
            expected_acceptance_length=accepted / max(blocks, 1),
            slot_accuracy=[round(share, 4) for share in (correct_T / supervised_T.clamp(min=1)).tolist()],
            num_labels=int(supervised_T.sum()),
        )


def summed(parts: Iterable[StepSums], block_size: int) -> Tensor:
    """`StepSums.numbers` added up, [4 + 2 * (B - 1)] float64 on the CPU; zeros where a process had no share."""
    total = torch.zeros(4 + 2 * (block_size - 1), dtype=torch.float64)
    for part in parts:
        total += part.numbers()
    return total


@dataclass(frozen=True)
class Batch:
    """Padded micro-batch. Letters as in draft_model.py; T = B - 1."""

    features_NSF: Tensor
    anchors_NA: Tensor
    anchor_ids_NA: Tensor
    labels_NAT: Tensor
    supervised_NAT: Tensor
    visible_NAS: Tensor
    """Context row s < anchor."""


def collate(features: Sequence[Tensor], token_ids: Sequence[NDArray[np.int64]], blocks: Sequence[Blocks]) -> Batch:
    """Pad to the longest context and the most blocks; padding blocks sit at position 0, see only themselves and
    have no supervised slot."""
    device = features[0].device
    length, count = max(f.shape[0] for f in features), max(len(b.anchors_A) for b in blocks)
    n, slots = len(features), blocks[0].labels_AT.shape[1]
    padded = features[0].new_zeros(n, length, features[0].shape[1])
    anchors = np.zeros((n, count), dtype=np.int64)
    anchor_ids, labels = np.zeros_like(anchors), np.zeros((n, count, slots), dtype=np.int64)
    supervised = np.zeros((n, count, slots), dtype=np.bool_)
    for row, (feature, ids, block) in enumerate(zip(features, token_ids, blocks, strict=True)):
        padded[row, : feature.shape[0]] = feature
        used = len(block.anchors_A)
        anchors[row, :used], anchor_ids[row, :used] = block.anchors_A, ids[block.anchors_A]
        labels[row, :used], supervised[row, :used] = block.labels_AT, block.supervised_AT
    moved = [torch.from_numpy(x).to(device) for x in (anchors, anchor_ids, labels, supervised)]
    visible = torch.arange(length, device=device) < moved[0][..., None]
    return Batch(padded, moved[0], moved[1], moved[2], moved[3], visible)


def forward_blocks(draft: DraftModel, batch: Batch, embed_VH: Tensor) -> Tensor:
    """Final hidden states of all slots, [N, A, B, H]."""
    n, a = batch.anchors_NA.shape
    config = draft.config
    ids = torch.full((n, a, config.block_size), config.mask_token_id, device=batch.anchors_NA.device)
    ids[..., 0] = batch.anchor_ids_NA
    positions = torch.arange(batch.features_NSF.shape[1], device=ids.device).expand(n, -1)
    contexts = draft.project_context(batch.features_NSF, positions)
    bias = torch.zeros(batch.visible_NAS.shape, device=ids.device).masked_fill_(~batch.visible_NAS, -torch.inf)
    # The residual stream has the compute type, as it has at inference.
    hidden: Tensor = draft(embed_VH[ids].to(_compute_dtype(draft.fc.weight)), batch.anchors_NA, contexts, bias)
    return hidden


def _compute_dtype(weight: Tensor) -> torch.dtype:
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def training_sums(
    draft: DraftModel, head: FrozenHead, batch: Batch, *, gamma: float, distill: float, teacher_NSH: Tensor | None
) -> StepSums:
    """Loss and accuracy sums of one micro-batch.

    teacher_NSH: the target's last decoder states [N, S, H] when distilling; row t judges the token at t + 1.
    """
    hidden_NATH = forward_blocks(draft, batch, head.embed_VH)[:, :, 1:]
    rows_NAT = head.row_of_token_V[batch.labels_NAT]
    scored_NAT = batch.supervised_NAT & (rows_NAT >= 0)
    weight_T = torch.from_numpy(slot_weights(draft.config.block_size, gamma)).to(hidden_NATH.device)
    weights_NAT = weight_T * scored_NAT
    teacher, teacher_rows = None, None
    if distill > 0:
        assert teacher_NSH is not None
        teacher, teacher_rows = _teacher(head, batch, teacher_NSH, scored_NAT)
    loss, predicted = frozen_head_loss(
        hidden_NATH[scored_NAT],
        head.head_KH,
        rows_NAT[scored_NAT],
        weights_NAT[scored_NAT],
        teacher_PH=teacher,
        teacher_rows_R=teacher_rows,
        distill=distill,
    )
    correct_NAT = torch.zeros_like(scored_NAT)
    correct_NAT[scored_NAT] = predicted == rows_NAT[scored_NAT]
    real_NA = batch.supervised_NAT.any(-1)
    prefix = correct_NAT.long().cumprod(-1).sum(-1)
    return StepSums(
        loss=loss,
        weight=float(weights_NAT.sum()),
        correct_T=correct_NAT.sum((0, 1)),
        supervised_T=batch.supervised_NAT.sum((0, 1)),
        accepted=float((1 + prefix)[real_NA].sum()),
        num_blocks=int(real_NA.sum()),
    )


@torch.no_grad()
def _teacher(head: FrozenHead, batch: Batch, teacher_NSH: Tensor, scored_NAT: Tensor) -> tuple[Tensor, Tensor]:
    """The head's mean row under the target's distribution over the draft vocabulary, at the positions that judge a slot
    [P, H], and which is whose."""
    n, s, _ = teacher_NSH.shape
    slots = torch.arange(batch.labels_NAT.shape[2], device=teacher_NSH.device)
    judge_NAT = batch.anchors_NA[..., None] + slots + s * torch.arange(n, device=slots.device)[:, None, None]
    positions_P, rows_R = judge_NAT[scored_NAT].unique(return_inverse=True)
    states = head.final_norm(teacher_NSH.flatten(0, 1)[positions_P].to(head.head_KH.dtype))
    means = [softmax_as_is(part) @ head.head_KH for part in _logits_in_parts(states, head.head_KH)]
    return torch.cat(means), rows_R


def _logits_in_parts(states_PH: Tensor, head_KH: Tensor) -> Iterator[Tensor]:
    for part in states_PH.split(max(1, LARGEST_CHUNK // head_KH.shape[0])):
        yield part @ head_KH.T
