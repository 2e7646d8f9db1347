"""The one decoding loop: propose, verify, accept, commit, observe, emit.

Plain decoding is this loop without a drafter, a parked drafter is a budget of 0; there is no other loop. It
knows tokens, counts and time, and treats logits and features as opaque. Invariant, whenever control is with
the consumer: target and drafter have been fed the same committed tokens, all of them emitted or prompt, and
at most the newest emitted token (the anchor) is missing. So a consumer may stop at any round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from dflash.core.protocols import Acceptor, Drafter, Target
from dflash.core.stopping import StopRule
from dflash.errors import ConfigError, PromptError
from dflash.types import Acceptance, Clock, FinishReason, Proposal, Round, Verdict


def speculative_rounds(
    target: Target,
    drafter: Drafter | None,
    acceptor: Acceptor,
    stopping: StopRule,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    width: int | None = None,
    clock: Clock = time.perf_counter,
) -> Generator[Round, None, None]:
    """Decode from fresh sessions; yields one `Round` per forward of the target, the prefill's token first.

    Args:
        drafter: None = plain decoding.
        prompt_ids: at least one token, and room for one more in the target's context.
        max_new_tokens: limit of emitted tokens; the end of the context limits as well ("length").
        width: most rows of a verify forward (anchor + proposal); None = as many as the drafter proposes.
        clock: seconds; a round's times are read from it. Only host time is seen: on an asynchronous device
            the wait for a forward lands where its result is first read.

    Raises: PromptError, ConfigError at once, before the first round is asked for.
    """
    if not prompt_ids:
        raise PromptError("The prompt is empty; give at least one token (most chat templates add one).")
    room = target.max_length - len(prompt_ids)
    if room < 1:
        raise PromptError(
            f"The prompt has {len(prompt_ids)} tokens, but the target's context holds {target.max_length} including "
            "the answer; shorten the prompt or use a target with a longer context."
        )
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, not {max_new_tokens}.")
    if width is not None and width < 1:
        raise ConfigError(f"width must be at least 1 (the anchor's row), not {width}.")
    session = _Session(target, drafter, acceptor, stopping, clock)
    return session.rounds(prompt_ids, min(max_new_tokens, room), width)


@dataclass(frozen=True)
class _Session:
    """The parts of one generation."""

    target: Target
    drafter: Drafter | None
    acceptor: Acceptor
    stopping: StopRule
    clock: Clock

    def rounds(self, prompt_ids: Sequence[int], limit: int, width: int | None) -> Generator[Round, None, None]:
        """`limit` >= 1 is the number of tokens to emit at most; it fits into the context."""
        widest = self.drafter.max_proposal if self.drafter is not None else 0
        if width is not None:
            widest = min(widest, width - 1)
        step = self._prefill(prompt_ids, limit)
        yield step
        num_left = limit - len(step.tokens)
        while step.finish_reason is None:
            # One token of every round is the target's own, so more drafts than num_left - 1 could never be
            # emitted; this also keeps the fed rows inside the context.
            step = self._round(step.tokens[-1], min(widest, num_left - 1), num_left)
            num_left -= len(step.tokens)
            yield step

    def _prefill(self, prompt_ids: Sequence[int], limit: int) -> Round:
        started = self.clock()
        verdict = self.target.prefill(prompt_ids)
        verified = self.clock()
        self._observe(prompt_ids, verdict, range(len(prompt_ids)))
        token = self.acceptor.accept(Proposal(), verdict).next_token
        tokens, reason = self._cut((token,), limit)
        return Round(
            tokens=tokens,
            num_proposed=0,
            num_accepted=0,
            draft_seconds=0.0,  # a prefill drafts nothing; its share for the drafter's context is in the total
            verify_seconds=verified - started,
            total_seconds=self.clock() - started,
            finish_reason=reason,
        )

    def _round(self, anchor: int, budget: int, num_left: int) -> Round:
        started = self.clock()
        proposal = self._propose(anchor, budget)
        proposed = self.clock()
        verdict = self.target.verify(anchor, proposal)
        verified = self.clock()
        acceptance = self.acceptor.accept(proposal, verdict)
        accepted = proposal.along(acceptance.path)
        tokens, reason = self._cut((*accepted, acceptance.next_token), num_left)
        # Rows to keep: the anchor and those emitted tokens that were fed, i.e. all but the target's own.
        num_accepted = min(len(accepted), len(tokens))
        path = acceptance.path[: 1 + num_accepted]
        self.target.commit(path)
        committed = self.clock()
        learn: Callable[[Acceptance], None] | None = getattr(self.drafter, "learn", None)
        if acceptance.chances and learn is not None:
            learn(acceptance)
        self._observe((anchor, *accepted[:num_accepted]), verdict, path)
        ended = self.clock()
        return Round(
            tokens=tokens,
            num_proposed=len(proposal.tokens),
            num_accepted=num_accepted,
            draft_seconds=(proposed - started) + (ended - committed),
            verify_seconds=verified - proposed,
            total_seconds=ended - started,
            finish_reason=reason,
            num_slots=max(proposal.depths()),
            reason=proposal.reason,
            sources=tuple(proposal.sources[row - 1] for row in path[1:]) if proposal.sources else (),
        )

    def _propose(self, anchor: int, budget: int) -> Proposal:
        if self.drafter is None or budget < 1:
            return Proposal()
        proposal = self.drafter.propose(anchor, budget)
        assert max(proposal.depths()) <= budget, "a drafter must keep to its budget"
        assert proposal.parents is None or self.target.supports_trees, "this target takes chains only"
        return proposal

    def _observe(self, token_ids: Sequence[int], verdict: Verdict, rows: Sequence[int]) -> None:
        """Tell the drafter the committed tokens and their features, which lie in these rows of the verdict."""
        if self.drafter is None:
            return
        features = verdict.features
        if features is not None:
            is_prefix = rows[-1] == len(rows) - 1
            features = features[: len(rows)] if is_prefix else features[list(rows)]
        self.drafter.observe(token_ids, features)

    def _cut(self, tokens: tuple[int, ...], num_left: int) -> tuple[tuple[int, ...], FinishReason | None]:
        """What may be emitted of a round's tokens, and why the generation ends with it, if it does."""
        tokens = tokens[:num_left]
        stop = self.stopping.first_stop(tokens)
        if stop is not None:
            return tokens[:stop], "stop"
        return tokens, "length" if len(tokens) == num_left else None
