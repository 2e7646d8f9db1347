"""What every architecture must pass, as functions that say how far a target is from the bare Transformers model.

The reference is always one forward of the bare model without a cache: it shares no code with our states and masks.
Used by the tests and by scripts/write_architectures.py, which prints the table of docs/architectures.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel

from dflash.backends.torch.sampling import TorchAcceptor
from dflash.backends.torch.target import TorchTarget, TorchTargetSession
from dflash.core.loop import speculative_rounds
from dflash.core.stopping import StopRule
from dflash.types import Proposal, SamplingParams
from tests.backends.architectures import VOCAB_SIZE, WINDOW, tokens

PROMPT = tokens(2 * WINDOW + 5)
"""Longer than two windows."""
BLOCK = tokens(5, seed=1)
NEXT = tokens(3, seed=2)
NUM_TOKENS = 64
"""Eight windows deep."""
BLOCK_SIZE = 6
DRAFTERS = ("random", "own text", "adversarial")


@torch.no_grad()
def bare_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(ids), V] of the bare model, without a cache."""
    logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def rollback_error(target: TorchTarget, kept: int, *, exact: bool) -> float:
    """Prefill, verify a block, keep `kept` rows, and one more step: the largest difference of the next logits and of
    a further round's from those of a run that was only ever fed the kept tokens."""
    session = target.session(exact=exact)
    session.prefill(PROMPT)
    feed(session, BLOCK)
    session.commit(range(kept))
    fed = [*PROMPT, *BLOCK[:kept]]
    first = feed(session, NEXT)
    session.commit(range(1))
    second = feed(session, NEXT[1:])
    expected = bare_logits(target.model, [*fed, *NEXT])[len(fed) :]
    return max(error(first, expected), error(second, expected[1:]))


def feed(session: TorchTargetSession, ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(ids), V] of a verify forward."""
    logits: torch.Tensor = session.verify(ids[0], Proposal(tuple(ids[1:]))).logits
    return logits


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference."""
    return float((ours - expected).abs().max())


def chunking_error(model: PreTrainedModel, taps: Sequence[int], chunk: int) -> float:
    """The largest difference of a prefill in chunks from the bare model: logits, features, and the next step."""
    target = TorchTarget(model, taps=taps, prefill_chunk=chunk)
    session = target.session()
    verdict = session.prefill(PROMPT)
    expected = bare_logits(model, [*PROMPT, *NEXT])
    found = max(
        error(verdict.logits[0], expected[len(PROMPT) - 1]), error(feed(session, NEXT), expected[len(PROMPT) :])
    )
    if taps:
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([PROMPT]), use_cache=False, output_hidden_states=True).hidden_states
        wanted = torch.cat([hidden[tap + 1][0] for tap in taps], dim=-1)
        found = max(found, error(verdict.features, wanted))
    target.close()
    return found


@dataclass
class KnowingDrafter:
    """A drafter that knows the text, spoiled as its kind says; the verified tokens tell it where it is."""

    kind: str
    truth: Sequence[int]
    max_proposal: int = BLOCK_SIZE - 1
    _num_observed: int = 0
    _num_rounds: int = 0
    _random: Random = field(default_factory=lambda: Random(0))

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        self._num_observed += len(token_ids)

    def propose(self, anchor: int, budget: int) -> Proposal:
        right = list(self.truth[self._num_observed + 1 :][:budget])
        good = self._good()
        return Proposal(tuple(token if good[slot] else self._wrong(token) for slot, token in enumerate(right)))

    def _good(self) -> list[bool]:
        """Which slots are right: none but by chance; three of four; all but one, another one in each round."""
        self._num_rounds += 1
        if self.kind == "random":
            return [False] * self.max_proposal
        if self.kind == "own text":
            return [self._random.random() < 0.75 for _ in range(self.max_proposal)]
        return [slot != self._num_rounds % self.max_proposal for slot in range(self.max_proposal)]

    def _wrong(self, token: int) -> int:
        return self._random.randrange(VOCAB_SIZE) if self.kind == "random" else (token + 1) % VOCAB_SIZE


def decode(target: TorchTarget, drafter: KnowingDrafter | None, *, exact: bool = False) -> list[int]:
    """NUM_TOKENS greedy tokens behind the prompt."""
    session = target.session(exact=exact)
    params = SamplingParams(max_new_tokens=NUM_TOKENS)
    acceptor = TorchAcceptor(params, PROMPT, target.vocab_size, target.device)
    rounds = speculative_rounds(session, drafter, acceptor, StopRule(()), PROMPT, max_new_tokens=NUM_TOKENS)
    text = [token for step in rounds for token in step.tokens]
    session.close()
    return text


def bare_text_is(model: PreTrainedModel, text: Sequence[int]) -> bool:
    """Whether `text` is what the bare model says greedily behind the prompt, one forward over all of it."""
    rows = bare_logits(model, [*PROMPT, *text])[len(PROMPT) - 1 : -1]
    return bool((rows.argmax(dim=-1) == torch.tensor(text)).all())
