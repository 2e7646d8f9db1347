"""The values that travel between core, backends and clients: plain data, no torch, no mlx.

Positions count from 0 over the whole sequence (prompt and output). `n` is the number of tokens the
target has been fed; the *anchor* is the newest emitted token, known but not fed yet, at position n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash import arguments
from dflash.errors import ConfigError

Clock = Callable[[], float]
"""Seconds since some moment; replaced in tests."""

FinishReason = Literal["stop", "length", "cancelled"]
"""Why a generation ended: a stop token or string, the token limit or context, or the consumer."""

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


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

        self._check_types()
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
        require(all(self.stop), "a stop string must not be empty.")

    def _check_types(self) -> None:
        """Raise ConfigError for a value of another type than its field's."""
        for name in ("max_new_tokens", "top_k", "seed"):
            arguments.check_whole(name, getattr(self, name))
        for name in ("temperature", "top_p", "min_p", *_PENALTIES):
            arguments.check_number(name, getattr(self, name))
        arguments.check_logit_bias("logit_bias", self.logit_bias)
        arguments.check_token_ids("stop_token_ids", self.stop_token_ids)
        arguments.check_texts("stop", self.stop)
        arguments.check_flag("ignore_eos", self.ignore_eos)


Mode = Literal["exact", "auto", "fast"]
"""exact: chains and copies only, which keep bit-exactness. fast: trees as well; a row of a tree sees its ancestors in
other places of the cache, so near-ties may be rounded otherwise, and where tokens are sampled, guesses may be drawn, so
that a seed's text is another one of the same distribution. auto: chains, until trees have been shown to bring
10 % more."""
MODES: tuple[Mode, ...] = ("exact", "auto", "fast")


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """How an engine or one request drafts. In mode "exact" no choice changes a bit of the text, only speed."""

    mode: Mode = "auto"
    fixed: bool = False
    """Feed whole blocks of the draft, no copies, no decisions by cost."""
    copies: bool = True
    """Look for copies of earlier text beside the draft."""
    bigrams: bool = True
    """Judge the draft's candidates by the ones before them, where counts lie beside the draft (`core/bigrams.py`)."""
    draws: bool = True
    """In mode "fast", where tokens are sampled: draw guesses from the draft's distribution where that is better than
    its first choices. The target's distribution stays, the text of a seed does not."""
    steady: bool = False
    """Decide by the costs measured beforehand, not by how fast rounds are just now: the same requests in the same order
    then repeat every round, which a benchmark wants; a machine whose pace changes is followed less well."""
    width: int | None = None
    """Most rows of a verify forward, the anchor's included; None = what the engine has checked."""
    draft_window: int | None = None
    """Newest context rows that layers of the draft with full attention see; None = all. The target sees all."""

    def __post_init__(self) -> None:
        arguments.check_choice("mode", self.mode, MODES)
        for name in ("fixed", "copies", "bigrams", "draws", "steady"):
            arguments.check_flag(name, getattr(self, name))
        for name in ("width", "draft_window"):
            arguments.check_whole(name, getattr(self, name), optional=True)


@dataclass(frozen=True)
class DrawnFrom:
    """The distribution that a draft token was drawn from."""

    ids: tuple[int, ...]
    """Distinct token ids."""
    probs: tuple[float, ...]
    """Of each id; they add up to 1."""

    def of(self, token: int) -> float:
        """q(token)."""
        return self.probs[self.ids.index(token)] if token in self.ids else 0.0


@dataclass(frozen=True)
class Proposal:
    """What a drafter proposes after the anchor: a chain or a tree of draft tokens. Their q is a point mass (one-hot)
    unless `drawn_from` says otherwise.

    Token i is fed in row i + 1; row 0 is the anchor's. An empty chain is a plain step.
    """

    tokens: Sequence[int] = ()
    """A sequence of known length; a backend may still be computing the ids when the length is asked for."""
    parents: tuple[int, ...] | None = None
    """parents[i]: the row that token i follows, always an earlier one; None = a chain (parents[i] = i)."""
    log_probs: tuple[float, ...] = field(default=(), compare=False)
    """Per token the drafter's own log-probability, given the tokens before it; empty = not said."""
    sources: tuple[str, ...] = field(default=(), compare=False)
    """Per token where the guess comes from ("draft", "copy", "both"), for statistics; empty = not said."""
    reason: str = field(default="", compare=False)
    """What was chosen this round, in a word or two for statistics; empty = not said."""
    drawn_from: tuple[DrawnFrom | None, ...] = ()
    """Of a chain, per token the distribution it was drawn from, None = a point mass; empty = point masses only."""
    asked: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    """Per row the ids whose probabilities the drafter wants to know (`Acceptance.chances`); empty = none."""

    @classmethod
    def tree(
        cls,
        tokens: Sequence[int],
        parents: Sequence[int],
        *,
        sources: Sequence[str] = (),
        reason: str = "",
        asked: tuple[tuple[int, ...], ...] = (),
    ) -> Proposal:
        """The proposal of a tree; a tree of one chain is that chain, so that both are treated the same."""
        assert all(parent <= index for index, parent in enumerate(parents)), "parents come before their children"
        is_chain = all(parent == index for index, parent in enumerate(parents))
        shape = None if is_chain else tuple(parents)
        return cls(tuple(tokens), shape, sources=tuple(sources), reason=reason, asked=asked)

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
class CandidateTable:
    """What a drafter thinks of the slots behind the anchor before it settles on tokens: K candidates for each of T
    slots, best first. Chains and trees are built from it in core, alone or together with copies."""

    ids: Sequence[Sequence[int]]
    """[T][K] token ids, distinct within a slot."""
    log_probs: Sequence[Sequence[float]]
    """[T][K], by the drafter's own full distribution, descending; given any prefix where `transitions` is None."""
    transitions: Sequence[Sequence[Sequence[float]]] | None = None
    """[T-1][K][K]: log-probability of candidate b of slot t+1 after candidate a of slot t; None = the rows of a slot
    are all equal (`log_probs`), as in one-pass drafts."""


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
    chances: tuple[tuple[float, ...], ...] = field(default=(), compare=False)
    """Per row of `path` the target's probabilities (processed, behind temperature and filters) of `Proposal.asked`;
    empty where nothing was asked, or nothing is drawn."""

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
    reason: str = ""
    """What the drafter chose to do, in a word or two ("copy", "draft + copy", "plain"); empty = it does not say."""
    sources: tuple[str, ...] = ()
    """Per accepted and emitted draft token where the guess came from; empty = the drafter does not say."""


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
    reasons: dict[str, int] = field(default_factory=dict)
    """Rounds by what the drafter chose to do."""
    rows: dict[int, int] = field(default_factory=dict)
    """Rounds by rows fed to the target (anchor included)."""
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    """Accepted draft tokens by where the guess came from ("draft", "copy", "both")."""
    finish_reason: FinishReason | None = None
    notes: list[str] = field(default_factory=list)
    """What was chosen beyond chains of the draft's first choices and copies, and why, a sentence each; known at the
    end."""
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
        self.rows[1 + step.num_proposed] = self.rows.get(1 + step.num_proposed, 0) + 1
        if step.reason:
            self.reasons[step.reason] = self.reasons.get(step.reason, 0) + 1
        for source in step.sources:
            self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + 1
        self.finish_reason = step.finish_reason or self.finish_reason


@dataclass(frozen=True)
class Result:
    """A finished generation."""

    text: str
    """Decoded output, special tokens and everything from a stop string on removed."""
    token_ids: list[int]
    """Emitted ids, a final stop token included."""
    stats: Stats
