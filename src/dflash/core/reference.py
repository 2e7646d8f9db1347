"""The specification of logit processing and acceptance, in NumPy, written to be read.

Every backend's acceptor is tested against this file. Order of processing, all in float32: logit bias,
repetition, presence and frequency penalties (`process_logits`), temperature, top-k, top-p, min-p
(`distribution`). Ties at the boundary of top-k or top-p all stay, so that the result does not depend on a
sorting order. Acceptance follows Leviathan et al., arXiv:2211.17192: whatever the drafter proposes, the
output has exactly the target's distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash.core.draws import ACCEPTANCE, uniform, uniforms
from dflash.types import Acceptance, Proposal, SamplingParams, Verdict

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class SparseProbs:
    """A draft distribution q that is zero outside a few candidates."""

    ids: NDArray[np.int64]  # [K], distinct
    probs: FloatArray  # [K], sums to 1

    def of(self, token: int) -> float:
        """q(token)."""
        return float(self.probs[self.ids == token].sum())


DraftProbs = FloatArray | SparseProbs
"""What one draft token was really drawn from: dense [V] or sparse."""


def process_logits(
    logits: FloatArray,  # [V]
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
) -> FloatArray:
    """Bias and penalties for the token after prompt + output, [V].

    `output_ids` is the hypothetical prefix: for row j of a verify forward it includes the j draft tokens
    before that row. Repetition counts prompt and output (as in Hugging Face's processor), presence and
    frequency count the output only (as in OpenAI's definition).
    """
    result = np.array(logits, dtype=np.float32)
    for token, bias in params.logit_bias.items():
        result[token] += np.float32(bias)
    penalty = np.float32(params.repetition_penalty)
    for token in {*prompt_ids, *output_ids}:
        result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
    for token, count in Counter(output_ids).items():
        result[token] -= np.float32(params.presence_penalty)
        result[token] -= np.float32(params.frequency_penalty) * np.float32(count)
    return result


def distribution(logits: FloatArray, params: SamplingParams) -> FloatArray:
    """The probabilities [V] that a token is drawn from, for processed logits [V] and temperature > 0."""
    # The maximum goes first: a tiny temperature then gives 0 and -inf, not inf - inf.
    scaled = (logits - logits.max()) / max(np.float32(params.temperature), np.finfo(np.float32).tiny)
    if 0 < params.top_k < len(scaled):
        scaled[scaled < np.sort(scaled)[-params.top_k]] = -np.inf
    probs = np.exp(scaled)
    probs /= probs.sum()
    if params.top_p < 1:
        ranked = np.sort(probs)[::-1]
        num_below = int((np.cumsum(ranked, dtype=np.float64) < params.top_p).sum())
        probs[probs < ranked[min(num_below, len(ranked) - 1)]] = 0
    probs[probs < np.float32(params.min_p) * probs.max()] = 0
    normalised: FloatArray = probs / probs.sum()
    return normalised


def draw(probs: FloatArray, uniform_draw: float) -> int:
    """Inverse CDF in order of ids: the first token whose cumulative probability exceeds the draw in [0, 1).

    `probs` [V] need not be normalised; tokens of probability 0 are never drawn.
    """
    cumulative = np.cumsum(probs, dtype=np.float64)
    aim = min(uniform_draw * cumulative[-1], np.nextafter(cumulative[-1], 0))
    return int(np.searchsorted(cumulative, aim, side="right"))


def accept_greedy(draft: Sequence[int], logits: FloatArray) -> Acceptance:
    """T = 0: the longest prefix of `draft` [T] that equals the arg max of its row; `logits` is [T+1, V]."""
    return accept_choices(draft, [int(row.argmax()) for row in logits])


def accept_one_hot(draft: Sequence[int], probs: FloatArray, draws: Sequence[float]) -> Acceptance:
    """T > 0, point-mass proposals: draw the target's token of each row and compare.

    Token d is accepted with probability p(d) = min(1, p(d)/1), and given a rejection the drawn token has the
    law (p - q)+ / sum: exactly the general rule for a one-hot q. `probs` [T+1, V], `draws` [T+1].
    """
    return accept_choices(draft, [draw(row, value) for row, value in zip(probs, draws, strict=True)])


def accept_choices(draft: Sequence[int], choices: Sequence[int]) -> Acceptance:
    """Keep `draft` [T] as long as it agrees with the target's own tokens `choices` [T+1], one per row."""
    num_accepted = 0
    while num_accepted < len(draft) and draft[num_accepted] == choices[num_accepted]:
        num_accepted += 1
    return Acceptance.chain(num_accepted, choices[num_accepted])


def accept_sampled(
    draft: Sequence[int],  # [T]
    draft_probs: Sequence[DraftProbs],  # [T], draft[j] was drawn from draft_probs[j]
    probs: FloatArray,  # [T+1, V], the target's processed distributions
    accept_draws: Sequence[float],  # [T], in [0, 1), independent of the drafter's draws
    final_draw: float,  # in [0, 1), for the replacement or bonus
) -> Acceptance:
    """T > 0, sampled proposals: accept d with probability min(1, p(d)/q(d)); at the first rejection draw the
    replacement from the residual (p - q)+, after the last acceptance the bonus from p."""
    for index, token in enumerate(draft):
        p, q = probs[index], draft_probs[index]
        q_token = q.of(token) if isinstance(q, SparseProbs) else float(q[token])
        assert q_token > 0, "a draft token must come from the distribution it is judged by"
        if accept_draws[index] * q_token >= p[token]:
            return Acceptance.chain(index, draw(residual(p, q), final_draw))
    return Acceptance.chain(len(draft), draw(probs[len(draft)], final_draw))


def residual(p: FloatArray, q: DraftProbs) -> FloatArray:
    """(p - q)+ [V], not normalised; p itself if nothing is left, which is rounding only (p and q equal)."""
    rest = p.copy()
    if isinstance(q, SparseProbs):
        rest[q.ids] -= q.probs
    else:
        rest -= q
    rest = np.maximum(rest, 0)
    return rest if rest.sum() > 0 else p


class ReferenceAcceptor:
    """The acceptor of one request over NumPy logits: the functions above, row by row."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._prompt_ids = tuple(prompt_ids)
        self._output_ids: list[int] = []

    def accept(self, proposal: Proposal, verdict: Verdict) -> Acceptance:
        """`verdict.logits`: [rows, V], the anchor's and one per draft token. At every node the target's own token is
        chosen; if a child carries it the walk goes on there, else it is the next token."""
        tokens, parents = proposal.tokens, proposal.parents
        assert len(verdict.logits) == len(tokens) + 1, "one row per draft token and one for the anchor"
        if proposal.drawn_from and self._params.temperature > 0:
            path, token = self._accept_drawn(proposal, verdict)
            chances = self._chances(proposal, verdict, path)
            self._output_ids += [*proposal.along(path), token]
            return Acceptance(tuple(path), token, chances)
        path = [0]
        while True:
            token = self._choose(verdict.logits[path[-1]], proposal.along(path))
            children = [
                index + 1
                for index in range(len(tokens))
                if tokens[index] == token and (index if parents is None else parents[index]) == path[-1]
            ]
            if not children:
                break
            path.append(children[0])
        chances = self._chances(proposal, verdict, path)
        self._output_ids += [*proposal.along(path), token]
        return Acceptance(tuple(path), token, chances)

    def _accept_drawn(self, proposal: Proposal, verdict: Verdict) -> tuple[list[int], int]:
        """A chain with drawn tokens: each by the general rule, with draws that are keyed like the target's own."""
        path = [0]
        for row, (token, q) in enumerate(zip(proposal.tokens, proposal.drawn_from, strict=True)):
            drafted = proposal.tokens[:row]
            if q is None:
                own = self._choose(verdict.logits[row], drafted)
                if own != token:
                    return path, own
            else:
                position = len(self._prompt_ids) + len(self._output_ids) + row
                sparse = SparseProbs(np.array(q.ids), np.array(q.probs, np.float32))
                probs = np.stack([self._distribution(verdict.logits[row], drafted)] * 2)
                accept_draw = float(uniforms(self._params.seed, position, 1, ACCEPTANCE)[0])
                found = accept_sampled([token], [sparse], probs, [accept_draw], uniform(self._params.seed, position))
                if not found.num_accepted:
                    return path, found.next_token
            path.append(row + 1)
        return path, self._choose(verdict.logits[-1], proposal.tokens)

    def _chances(self, proposal: Proposal, verdict: Verdict, path: Sequence[int]) -> tuple[tuple[float, ...], ...]:
        """Probabilities of the tokens that were asked about, where tokens are drawn."""
        if not proposal.asked or self._params.temperature == 0:
            return ()
        found = []
        for step, row in enumerate(path):
            probs = self._distribution(verdict.logits[row], proposal.along(path[: step + 1]))
            found.append(tuple(float(probs[token]) for token in proposal.asked[row]))
        return tuple(found)

    def _distribution(self, logits: FloatArray, drafted: Sequence[int]) -> FloatArray:
        prefix = [*self._output_ids, *drafted]
        return distribution(process_logits(logits, self._params, self._prompt_ids, prefix), self._params)

    def _choose(self, logits: FloatArray, drafted: Sequence[int]) -> int:
        """The target's token after the output so far and `drafted`."""
        prefix = [*self._output_ids, *drafted]
        processed = process_logits(logits, self._params, self._prompt_ids, prefix)
        if self._params.temperature == 0:
            return int(processed.argmax())
        position = len(self._prompt_ids) + len(prefix)
        return draw(distribution(processed, self._params), uniform(self._params.seed, position))
