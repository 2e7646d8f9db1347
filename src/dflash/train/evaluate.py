"""The figure that decides: acceptance length by the real decode loop on held-out prompts.

Teacher-forced accuracy can rise while decoding does not (pitfalls E5), so the trainer's verdict comes from the same
`speculative_rounds`, target session and drafter that serve users.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.drafters.dflash import DFlashDrafter
from dflash.backends.torch.sampling import TorchAcceptor
from dflash.backends.torch.target import TorchTarget
from dflash.core.loop import speculative_rounds
from dflash.core.stopping import StopRule
from dflash.types import SamplingParams


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
    network.eval()
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
    network.train()
    nan = float("nan")
    return DecodeReport(tokens / rounds if rounds else nan, sum(means) / len(means) if means else nan, rounds, tokens)
