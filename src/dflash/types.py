"""The values that travel between core, backends and clients: plain data, no torch, no mlx.

Positions count from 0 over the whole sequence (prompt and output). `n` is the number of tokens the
target has been fed; the *anchor* is the newest emitted token, known but not fed yet, at position n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash.errors import ConfigError

FinishReason = Literal["stop", "length", "cancelled"]
"""Why a generation ended: a stop token or string, the token limit or context, or the consumer."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks for. All processing happens on float32 logits in this order: logit bias,
    repetition, presence and frequency penalties, temperature, top-k, top-p, min-p."""

    max_new_tokens: int = 256
    """Upper limit of emitted tokens (stop token included)."""
    temperature: float = 0.0
    """0 = greedy: the arg max of the biased, penalised logits."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 = off."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose probability reaches top_p; 1 = off."""
    min_p: float = 0.0
    """Drop tokens less probable than min_p times the most probable one; 0 = off."""
    repetition_penalty: float = 1.0
    """Divide positive (multiply negative) logits of tokens seen in prompt or output; 1 = off."""
    presence_penalty: float = 0.0
    """Subtract once from the logit of every token already in the output; 0 = off."""
    frequency_penalty: float = 0.0
    """Subtract once per occurrence in the output; 0 = off."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> number added to its logit (float('-inf') bans it)."""
    seed: int = 0
    """Every random draw is keyed by (seed, position): same seed, same text, with or without a draft."""
    stop_token_ids: Sequence[int] = ()
    """Further stop tokens besides the target's own end-of-sequence ids."""
    stop: Sequence[str] = ()
    """Stop strings; the text ends before the first one that appears."""
    ignore_eos: bool = False
    """Go on after the target's own end-of-sequence ids (benchmarks of fixed length)."""

    def __post_init__(self) -> None:
        def require(ok: bool, what: str) -> None:
            if not ok:
                raise ConfigError(what)

        require(self.max_new_tokens >= 1, f"max_new_tokens must be at least 1, not {self.max_new_tokens}.")
        require(0 <= self.temperature < math.inf, f"temperature must be 0 or positive, not {self.temperature}.")
        require(self.top_k >= 0, f"top_k must be 0 (off) or positive, not {self.top_k}.")
        require(0 < self.top_p <= 1, f"top_p must lie in (0, 1], not {self.top_p}.")
        require(0 <= self.min_p <= 1, f"min_p must lie in [0, 1], not {self.min_p}.")
        penalty = self.repetition_penalty
        require(0 < penalty < math.inf, f"repetition_penalty must be positive, not {penalty}.")
        for name in ("presence_penalty", "frequency_penalty"):
            require(math.isfinite(getattr(self, name)), f"{name} must be a number, not {getattr(self, name)}.")
        require(0 <= self.seed < 2**63, f"seed must lie in [0, 2^63), not {self.seed}.")
        require(not isinstance(self.stop, str), f"stop must be a list: [{self.stop!r}], not {self.stop!r}.")
        require(all(self.stop), "a stop string must not be empty.")


@dataclass(frozen=True)
class Proposal:
    """What a drafter proposes after the anchor: draft tokens with point-mass q (one-hot), a chain or a tree.

    Token i is fed in row i + 1; row 0 is the anchor's. An empty chain is a plain step.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    """parents[i]: the row that token i follows, always an earlier one; None = a chain (parents[i] = i)."""

    @classmethod
    def tree(cls, tokens: Sequence[int], parents: Sequence[int]) -> Proposal:
        """The proposal of a tree; a tree of one chain is that chain, so that both are treated the same."""
        assert all(parent <= index for index, parent in enumerate(parents)), "parents come before their children"
        is_chain = all(parent == index for index, parent in enumerate(parents))
        return cls(tuple(tokens), None if is_chain else tuple(parents))

    def depths(self) -> list[int]:
        """Tokens between the anchor and each row, [rows]: row j belongs at position n + depth."""
        if self.parents is None:
            return list(range(len(self.tokens) + 1))
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def along(self, path: Sequence[int]) -> tuple[int, ...]:
        """The draft tokens of the rows of `path`, without the anchor that it starts with."""
        return tuple(self.tokens[row - 1] for row in path[1:])


@dataclass(frozen=True)
class Verdict:
    """The target's answer to one forward: opaque to core, read by the acceptor and drafter of its backend.

    `logits` has one row per fed token that may be judged ([rows, V]; row j is the distribution after the
    anchor and the draft tokens from it down to row j's own); `features` the tapped hidden states of the fed
    rows, or None without taps: a slice picks those of a chain, a list of row numbers those of a tree's path.
    """

    logits: Any
    features: Any = None


@dataclass(frozen=True)
class Acceptance:
    """The acceptor's decision: which of the fed rows stand and the target's own token after them."""

    path: tuple[int, ...]
    """Fed rows to keep, ascending, each the parent of the next; the first is 0, the anchor's. Of a chain: 0..m."""
    next_token: int
    """Bonus (all accepted) or replacement, drawn from the target's row path[-1]."""

    @classmethod
    def chain(cls, num_accepted: int, next_token: int) -> Acceptance:
        """The first `num_accepted` tokens of a chain."""
        return cls(tuple(range(num_accepted + 1)), next_token)

    @property
    def num_accepted(self) -> int:
        """m: accepted draft tokens."""
        return len(self.path) - 1


@dataclass(frozen=True)
class Round:
    """One cycle as the loop reports it; only committed tokens appear here."""

    tokens: tuple[int, ...]
    """Tokens emitted by this round, cut at stop and limit; never empty."""
    num_proposed: int
    """Draft tokens that were fed: of a tree, all its nodes."""
    num_accepted: int
    """Accepted draft tokens that were emitted (after the cut)."""
    draft_seconds: float
    verify_seconds: float
    total_seconds: float
    finish_reason: FinishReason | None = None
    num_slots: int | None = None
    """Slots after the anchor that the proposal reached, i.e. the depth of a tree; None = num_proposed (a chain)."""


@dataclass
class Stats:
    """Figures of one generation. Times in seconds; the prefill produces the first token."""

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Emitted tokens, the prefill's one included."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    """Wall time of all rounds after the prefill (consumer's time between rounds excluded)."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    acceptance_lengths: list[int] = field(default_factory=list)
    """Tokens emitted per round (accepted + bonus, after the cut), in order; the prefill is no round."""
    num_proposed: int = 0
    num_accepted: int = 0
    proposed_per_slot: list[int] = field(default_factory=list)
    """[i]: rounds in which slot i+1 was proposed."""
    accepted_per_slot: list[int] = field(default_factory=list)
    """[i]: rounds in which slot i+1 was accepted."""
    finish_reason: FinishReason | None = None
    drafting_stopped: str | None = None
    """Why drafting was given up on the way, in one sentence (`core/parking.py`); None if it was not."""

    @property
    def num_rounds(self) -> int:
        """Rounds after the prefill = forwards of the target while decoding."""
        return len(self.acceptance_lengths)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per round, bonus included (tau); nan before the first round."""
        return sum(self.acceptance_lengths) / self.num_rounds if self.num_rounds else float("nan")

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first one per second of decode time; nan before the first round."""
        return sum(self.acceptance_lengths) / self.decode_seconds if self.decode_seconds else float("nan")

    @property
    def overhead_seconds(self) -> float:
        """Decode time that is neither draft nor target forward."""
        return self.decode_seconds - self.draft_seconds - self.verify_seconds

    def add(self, step: Round) -> None:
        """Count one round."""
        self.num_tokens += len(step.tokens)
        self.acceptance_lengths.append(len(step.tokens))
        self.decode_seconds += step.total_seconds
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds
        self.num_proposed += step.num_proposed
        self.num_accepted += step.num_accepted
        num_slots = step.num_proposed if step.num_slots is None else step.num_slots
        while len(self.proposed_per_slot) < num_slots:
            self.proposed_per_slot.append(0)
            self.accepted_per_slot.append(0)
        for slot in range(num_slots):
            self.proposed_per_slot[slot] += 1
            self.accepted_per_slot[slot] += slot < step.num_accepted
        self.finish_reason = step.finish_reason or self.finish_reason


@dataclass(frozen=True)
class Result:
    """A finished generation."""

    text: str
    """Decoded output, special tokens and everything from a stop string on removed."""
    token_ids: list[int]
    """Emitted ids, a final stop token included."""
    stats: Stats
