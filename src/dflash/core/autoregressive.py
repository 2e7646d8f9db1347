"""What a language model in a draft's place has been fed, and what of it still stands: the bookkeeping of its session.

Any model that may be a target may draft (arXiv:2211.17192, arXiv:2302.01318): its session is that of a target, without
taps. The model has always been fed the committed tokens, or a text that begins with them: where every layer can go
back (`rewinds`), the rows of a chain are kept and those that were rejected are cut off; where a layer cannot, each step
feeds the chain again without committing it, which is the slow reference. How a chain is computed is a backend's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from dflash.core.engine import SharedTarget, TargetSession

CHAIN = 7
"""Tokens of a chain: with the anchor a forward of eight rows. Each costs a forward of the draft model."""
WAITING = 16
"""Committed tokens that may wait for the next proposal, whose first forward then takes them along."""


Model = TypeVar("Model", bound=SharedTarget)


class RewindingSession(TargetSession, Protocol):
    """A target's session that may be able to take committed tokens back."""

    @property
    def rewinds(self) -> bool:
        """Whether every layer state can."""
        ...

    def rewind(self, num_tokens: int) -> None:
        """Take all but the first `num_tokens` committed tokens back; only where `rewinds` says so."""
        ...


class DraftingModel(Generic[Model]):
    """Weights side of a language model in a draft's place, shared by sessions; a backend adds `session`."""

    def __init__(self, model: Model, target: Model, *, chain: int = CHAIN, rewinds: bool = True) -> None:
        """
        Args:
            model: the draft model, without taps, on the target's device.
            target: whose ids are proposed; the models' embeddings may differ in padding.
            chain: most tokens of a proposal.
            rewinds: keep a chain's rows where the layers can go back; without it they are fed again (the reference).
        """
        self.model = model
        self.chain = chain
        self.rewinds = rewinds
        self.num_ids = min(model.vocab_size, target.vocab_size)
        """Ids that both models have; the others are padding."""

    def close(self) -> None:
        """Leave the draft model as it was found; sessions made before must not be used any more."""
        self.model.close()


class ChainStart(NamedTuple):
    """What the next chain is made from."""

    num_tokens: int
    """Tokens to write, at least 1."""
    waiting: list[int]
    """Committed tokens that the model has not been fed."""
    anchor: int


class AutoregressiveText:
    """The text of one request, and how much of it the draft model holds."""

    def __init__(self, session: RewindingSession, *, chain: int, num_ids: int, rewinds: bool) -> None:
        """
        Args:
            session: fresh, of the draft model.
            chain: most tokens of a proposal.
            num_ids: ids that both models have; the others are padding of their embeddings.
            rewinds: keep a chain's rows where the layers can go back; without it they are fed again (the reference).
        """
        self._session = session
        self._chain = chain
        self._num_ids = num_ids
        self._rewinds = rewinds and session.rewinds
        self._text: list[int] = []  # committed tokens
        self._fed: list[int] = []  # what the model has been fed: the text so far, then a chain where layers go back
        self._known = 0  # so many of the latter are known to agree with the former

    @property
    def max_proposal(self) -> int:
        """Most tokens of a chain."""
        return self._chain

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        """Learn newly committed tokens; `features` are not used."""
        # An id that only the target has is padding of its embedding; any other in its place spoils guesses at most.
        self._text += [min(token, self._num_ids - 1) for token in token_ids]
        self._cut()
        if len(self._text) - len(self._fed) > WAITING and len(self._text) < self._session.max_length:
            self._feed(self._text[len(self._fed) :])

    def _start(self, anchor: int, budget: int) -> ChainStart | None:
        """Get ready for a chain of at most `budget` tokens; None at the end of the draft model's context."""
        num_tokens = min(budget, self.max_proposal, self._session.max_length - len(self._text) - 1)
        if num_tokens < 1:
            return None
        self._cut()
        waiting = self._text[len(self._fed) :]
        if not self._rewinds and waiting:
            self._feed(waiting)
            waiting = []
        return ChainStart(num_tokens, waiting, min(anchor, self._num_ids - 1))

    def _feed(self, token_ids: Sequence[int]) -> Any:
        """Feed and commit tokens; logits [V] of the last one."""
        logits = self._session.prefill(token_ids).logits
        self._fed += token_ids
        return logits[-1]

    def _cut(self) -> None:
        """Forget what was fed beyond the committed text or differs from it."""
        kept = self._known
        while kept < min(len(self._fed), len(self._text)) and self._fed[kept] == self._text[kept]:
            kept += 1
        if kept < len(self._fed):
            self._session.rewind(kept)
            del self._fed[kept:]
        self._known = kept
