"""The three seams of speculative decoding: who proposes, who verifies, who decides.

A cycle is propose -> verify -> accept -> commit -> observe -> emit (`core/loop.py`). All state belongs to one
request: `Target` and `Drafter` objects here are *sessions*, made per generation by a backend's engine
around shared weights, so that two requests can never leak into each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dflash.types import Acceptance, Proposal, Verdict


class Target(Protocol):
    """A session of the target model. Contract: after `commit`, every layer state equals that of a run which
    was only ever fed the committed tokens."""

    @property
    def max_length(self) -> int:
        """Context limit in tokens (prompt + output)."""
        ...

    @property
    def supports_trees(self) -> bool:
        """Whether every layer state can hold branches; otherwise `verify` takes chains only."""
        ...

    def prefill(self, prompt_ids: Sequence[int]) -> Verdict:
        """Feed and commit the whole prompt (in chunks). Returns one logits row (the last) and the features of
        all prompt rows [len(prompt), taps x hidden]."""
        ...

    def verify(self, anchor: int, proposal: Proposal) -> Verdict:
        """Feed anchor + proposal without committing, row j at position n + its depth, seeing the committed tokens,
        its ancestors and itself; len(proposal.tokens) + 1 rows come back."""
        ...

    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows `path` of those that the last `verify` fed (`Acceptance.path`: anchor + accepted), drop the
        rest. The bonus token is not fed yet."""
        ...


class Drafter(Protocol):
    """A session of a drafter: anything that guesses what the target will say.

    One that asks what the target thinks of its guesses (`Proposal.asked`) has a further method `learn(acceptance)`,
    which is told the answer before `observe`.
    """

    @property
    def max_proposal(self) -> int:
        """Most tokens one `propose` can return (block - 1)."""
        ...

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        """Learn newly committed tokens and their features [len(token_ids), taps x hidden] (None if the
        target has no taps). First call: the prompt. Order and positions are those of the sequence."""
        ...

    def propose(self, anchor: int, budget: int) -> Proposal:
        """Guess at most `budget` (>= 1) tokens after `anchor`, which sits at position = tokens observed; branches of
        a tree may each be so long."""
        ...


class Acceptor(Protocol):
    """The acceptance rule with a request's sampling parameters; keeps the history that penalties need."""

    def accept(self, proposal: Proposal, verdict: Verdict) -> Acceptance:
        """Decide the accepted path and draw the next token from its last row. Remembers what it accepted: the next
        call continues after these tokens. An empty proposal is a plain step."""
        ...
