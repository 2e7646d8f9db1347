"""Held-out figures: acceptance length by the real decode loop, and teacher-forced figures beside it.

Teacher-forced accuracy can rise while decoding does not, so the trainer's verdict comes from the same
`speculative_rounds`, target session and drafter that serve users. The teacher-forced figures are cheap and, with
always the same anchors, far less noisy: they show the trend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.drafters.dflash import DFlashDrafter
from dflash.backends.torch.sampling import TorchAcceptor
from dflash.backends.torch.target import TorchTarget
from dflash.core.loop import speculative_rounds
from dflash.core.stopping import StopRule
from dflash.train.anchors import draw_blocks
from dflash.train.data import AnswerSequence
from dflash.train.features import FeatureSource
from dflash.train.step import FrozenHead, StepFigures, StepSums, collate, summed, training_sums
from dflash.types import SamplingParams

_HELD_OUT_SEQUENCES, _HELD_OUT_ANCHORS, _HELD_OUT_STREAM = 24, 40, 4


@dataclass(frozen=True)
class DecodeReport:
    """Greedy decoding of some prompts."""

    acceptance_length: float
    """Tokens per round over all prompts (bonus included)."""
    acceptance_length_per_prompt: float
    """Mean over prompts of each prompt's tokens per round."""
    num_rounds: int
    num_tokens: int


def decode_report(
    network: DraftModel,
    target: TorchTarget,
    prompts: Sequence[Sequence[int]],
    *,
    eos_ids: frozenset[int],
    max_new_tokens: int,
    progress: Callable[[int], None] | None = None,
) -> DecodeReport:
    """Decode every prompt greedily with `network` as draft. Prompts are token ids."""
    drafter = DFlashDrafter(network, target)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    rounds = tokens = 0
    means: list[float] = []
    for number, prompt in enumerate(prompts):
        session = target.session(exact=False)
        steps = list(
            speculative_rounds(
                session,
                drafter.session(),
                TorchAcceptor(params, prompt, target.vocab_size, target.device),
                StopRule(eos_ids),
                prompt,
                max_new_tokens=max_new_tokens,
            )
        )[1:]
        session.close()
        emitted = sum(len(step.tokens) for step in steps)
        rounds, tokens = rounds + len(steps), tokens + emitted
        if steps:
            means.append(emitted / len(steps))
        if progress is not None:
            progress(number + 1)
    nan = float("nan")
    return DecodeReport(tokens / rounds if rounds else nan, sum(means) / len(means) if means else nan, rounds, tokens)


@torch.no_grad()
def held_out_figures(
    network: DraftModel, head: FrozenHead, features: FeatureSource, sequences: Sequence[AnswerSequence], *, gamma: float
) -> StepFigures:
    """Figures of the first 24 `sequences` with hard labels, 40 anchors each that are the same at every call."""
    parts: list[StepSums] = []
    for number, sequence in enumerate(sequences[:_HELD_OUT_SEQUENCES]):
        blocks = draw_blocks(
            sequence.token_ids,
            sequence.loss_mask,
            block_size=network.config.block_size,
            num_anchors=_HELD_OUT_ANCHORS,
            rng=np.random.default_rng([_HELD_OUT_STREAM, number]),
        )
        rows = features.features(sequence.token_ids.tolist()).to(network.fc.weight.device, torch.float32)
        batch = collate([rows[:, : network.fc.in_features]], [sequence.token_ids], [blocks])
        parts.append(training_sums(network, head, batch, gamma=gamma, distill=0.0, teacher_NSH=None))
    return StepFigures.of(summed(parts, network.config.block_size))
