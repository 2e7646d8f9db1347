"""Fakes of the three protocols that check their own contract: they know the tokens they were given and
refuse a call that contradicts it. Logits are NumPy arrays, so no backend is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.core.loop import speculative_rounds
from dflash.core.protocols import Acceptor, Drafter
from dflash.core.reference import ReferenceAcceptor
from dflash.core.stopping import StopRule
from dflash.types import Acceptance, Proposal, Round, SamplingParams, Verdict

LogitsOf = Callable[[tuple[int, ...]], NDArray[np.float32]]
"""Tokens so far -> logits [V] of the next one."""
Guess = Callable[[tuple[int, ...]], int]
"""Tokens so far -> next token."""

VOCAB = 12


def scripted_logits(prompt: Sequence[int], script: Sequence[int], vocab_size: int = VOCAB) -> LogitsOf:
    """A target that says `script` after `prompt`, whatever it was fed at those positions; 0s afterwards."""

    def logits(prefix: tuple[int, ...]) -> NDArray[np.float32]:
        index = len(prefix) - len(prompt)
        row = np.zeros(vocab_size, np.float32)
        row[script[index] if index < len(script) else 0] = 1
        return row

    return logits


def random_logits(seed: int, vocab_size: int = VOCAB, scale: float = 2.0) -> LogitsOf:
    """A target whose next token depends on the last two tokens (and so on every wrongly kept row)."""
    table = np.random.default_rng(seed).normal(size=(vocab_size, vocab_size, vocab_size)).astype(np.float32) * scale

    def logits(prefix: tuple[int, ...]) -> NDArray[np.float32]:
        row: NDArray[np.float32] = table[prefix[-2] if len(prefix) > 1 else 0, prefix[-1]]
        return row

    return logits


class FakeTarget:
    """A target over a logits function. Features are [rows, 2]: position and token of each fed row."""

    def __init__(
        self, logits: LogitsOf, max_length: int = 10_000, *, has_taps: bool = True, trees: bool = True
    ) -> None:
        self._logits = logits
        self._supports_trees = trees
        self._max_length = max_length
        self._has_taps = has_taps
        self.committed: tuple[int, ...] = ()
        self._fed: tuple[int, Proposal] | None = None
        self.num_verified: list[int] = []
        """Rows of each verify call."""

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def supports_trees(self) -> bool:
        return self._supports_trees

    def prefill(self, prompt_ids: Sequence[int]) -> Verdict:
        assert self.committed == (), "one prefill per session"
        self.committed = tuple(prompt_ids)
        assert len(self.committed) <= self._max_length
        return Verdict(self._logits(self.committed)[None], self._features(range(len(self.committed)), self.committed))

    def verify(self, anchor: int, proposal: Proposal) -> Verdict:
        assert self.committed, "prefill comes first"
        assert self._fed is None, "every verify is followed by a commit"
        assert proposal.parents is None or self._supports_trees, "a tree for a target that takes chains only"
        depths = proposal.depths()
        assert len(self.committed) + max(depths) < self._max_length, "fed beyond the context"
        self._fed = (anchor, proposal)
        self.num_verified.append(len(depths))
        ancestry: list[tuple[int, ...]] = [(0,)]
        for index in range(len(proposal.tokens)):
            parent = index if proposal.parents is None else proposal.parents[index]
            ancestry.append((*ancestry[parent], index + 1))
        rows = [self._logits((*self.committed, anchor, *proposal.along(path))) for path in ancestry]
        positions = [len(self.committed) + depth for depth in depths]
        return Verdict(np.stack(rows), self._features(positions, (anchor, *proposal.tokens)))

    def commit(self, path: Sequence[int]) -> None:
        assert self._fed is not None, "commit follows verify"
        anchor, proposal = self._fed
        parents = (None, *(range(len(proposal.tokens)) if proposal.parents is None else proposal.parents))
        assert path[0] == 0, "the anchor is always kept"
        assert [parents[row] for row in path[1:]] == list(path[:-1]), "a path goes from parents to children"
        self.committed += (anchor, *proposal.along(path))
        self._fed = None

    def _features(self, positions: Sequence[int], tokens: tuple[int, ...]) -> NDArray[np.int64] | None:
        return np.array(list(zip(positions, tokens, strict=True))) if self._has_taps else None


class FakeDrafter:
    """A drafter that guesses token by token; checks that it sees every committed row once, in order."""

    def __init__(self, guess: Guess, max_proposal: int = 4) -> None:
        self._guess = guess
        self._max_proposal = max_proposal
        self.observed: tuple[int, ...] = ()
        self.budgets: list[int] = []

    @property
    def max_proposal(self) -> int:
        return self._max_proposal

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        if features is not None:
            expected = [[len(self.observed) + index, token] for index, token in enumerate(token_ids)]
            assert features.tolist() == expected, "features of other rows than the committed ones"
        self.observed += tuple(token_ids)

    def propose(self, anchor: int, budget: int) -> Proposal:
        assert 1 <= budget <= self._max_proposal
        self.budgets.append(budget)
        tokens = (*self.observed, anchor)
        for _ in range(budget):
            tokens += (self._guess(tokens),)
        return Proposal(tokens[len(self.observed) + 1 :])


class FakeAcceptor:
    """Accepts as told: `accepted[i]` tokens in call i, with the arg max of the row after them."""

    def __init__(self, accepted: Sequence[int]) -> None:
        self._accepted = list(accepted)

    def accept(self, proposal: Proposal, verdict: Verdict) -> Acceptance:
        num_accepted = min(self._accepted.pop(0), len(proposal.tokens))
        return Acceptance.chain(num_accepted, int(verdict.logits[num_accepted].argmax()))


def guess_right(logits: LogitsOf) -> Guess:
    """Always the target's arg max: everything is accepted at temperature 0."""
    return lambda prefix: int(logits(prefix).argmax())


def guess_wrong(logits: LogitsOf) -> Guess:
    """Never the target's arg max (adversarial)."""
    return lambda prefix: (int(logits(prefix).argmax()) + 1) % len(logits(prefix))


def guess_sometimes(logits: LogitsOf, seed: int = 0) -> Guess:
    """Right at about two positions of three, wrong at the others."""
    right = np.random.default_rng(seed).random(10_000) < 0.67
    good, bad = guess_right(logits), guess_wrong(logits)
    return lambda prefix: good(prefix) if right[len(prefix)] else bad(prefix)


def run_rounds(
    logits: LogitsOf,
    prompt: Sequence[int],
    params: SamplingParams,
    guess: Guess | None = None,
    *,
    acceptor: Acceptor | None = None,
    stopping: StopRule | None = None,
    max_proposal: int = 4,
    width: int | None = None,
) -> list[Round]:
    """A whole generation over fakes, with NumPy acceptance unless another acceptor is given."""
    drafter: Drafter | None = None if guess is None else FakeDrafter(guess, max_proposal)
    rounds = speculative_rounds(
        FakeTarget(logits),
        drafter,
        acceptor or ReferenceAcceptor(params, prompt),
        stopping or StopRule(params.stop_token_ids),
        prompt,
        max_new_tokens=params.max_new_tokens,
        width=width,
    )
    return list(rounds)


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    """All emitted tokens."""
    return [token for step in rounds for token in step.tokens]
