"""Acceptance on MLX logits: the rules of `core/reference.py`, with one wait for the device per round.

Greedy rows are compared on the device and only token ids are read, of a tree how near a tie they are as well. At a
temperature the device gives the rows' weights (on Apple silicon the host reads them in place), and NumPy draws from
them in float64, which MLX's GPUs do not have, one row at a time and only up to the first rejection. Knows nothing of
drafters or of model state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from dflash.core.draws import ACCEPTANCE, uniforms
from dflash.core.processing import Counts, Penalties, check_bias, has_penalties, require_finite
from dflash.core.reference import SparseProbs, draw, residual
from dflash.core.tree import tie_margin, undecided, walk, walk_drawn
from dflash.types import Acceptance, DrawnFrom, Proposal, SamplingParams, Verdict


class MLXAcceptor:
    """The acceptor of one request: draws (or arg-maxes) the target's token of each row and compares.

    With point-mass proposals that is the exact acceptance rule at any temperature (docs/algorithm.md), and as the
    draws are keyed by position it gives the text of plain decoding with the same seed.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int, *, computed_in: mx.Dtype | None = None
    ) -> None:
        """`vocab_size`: width of the logits; `computed_in`: the model's dtype, where its logits may come in a wider
        one. Raises ConfigError for a logit_bias that cannot be applied."""
        self._params = params
        self._eps = 0.0 if computed_in is None else float(mx.finfo(computed_in).eps)
        self._position = len(prompt_ids)
        """Sequence position of the next token to be decided."""
        check_bias(params, vocab_size)
        self._bias_ids = mx.array(list(params.logit_bias), dtype=mx.int32)
        self._bias_values = mx.array(list(params.logit_bias.values()), dtype=mx.float32)
        self._penalties = Penalties(params, prompt_ids) if has_penalties(params) else None

    def accept(self, proposal: Proposal, verdict: Verdict) -> Acceptance:
        """`verdict.logits`: [rows, V], the anchor's and one per draft token, any float dtype. Raises ModelError if the
        rows it reads are not finite."""
        logits: mx.array = verdict.logits
        assert logits.shape[0] == len(proposal.tokens) + 1, "one row per draft token and one for the anchor"
        counts = None if self._penalties is None else self._penalties.counts(proposal)
        processed = self._process(logits, counts)
        if self._params.temperature > 0:
            acceptance = self._sampled(proposal, _Drawn(processed, proposal, self._params, self._position))
        else:
            eps = max(self._eps, float(mx.finfo(logits.dtype).eps))
            greedy = _Greedy(processed, eps, margins=proposal.parents is not None)
            acceptance = walk(proposal, greedy.choose)
            if proposal.parents is not None:
                acceptance = undecided(proposal, acceptance, greedy.is_near_tie)
        self._position += len(acceptance.path)
        if self._penalties is not None:
            self._penalties.extend((*proposal.along(acceptance.path), acceptance.next_token))
        return acceptance

    def _process(self, logits: mx.array, counts: Counts | None) -> mx.array:
        """Bias and penalties; float32 unless there is nothing to do."""
        if not self._params.logit_bias and counts is None:
            return logits
        result = logits.astype(mx.float32)
        if self._params.logit_bias:
            result = result.at[:, self._bias_ids].add(self._bias_values)
        return result if counts is None else _penalised(result, self._params, counts)

    @staticmethod
    def _sampled(proposal: Proposal, drawn: _Drawn) -> Acceptance:
        """Point masses by the walk, drawn tokens by the general rule; with what the drafter asked."""
        if proposal.drawn_from:
            acceptance = walk_drawn(proposal, drawn.choose, drawn.accepts, drawn.replacement)
        else:
            acceptance = walk(proposal, drawn.choose)
        return replace(acceptance, chances=drawn.chances(acceptance.path, proposal.asked))


class _Greedy:
    """The arg max of each row of [R, V], the first one of equals; with `margins` also how far behind the next is."""

    def __init__(self, logits: mx.array, eps: float, *, margins: bool) -> None:
        """`eps`: of the dtype that the logits were computed in, before they were processed."""
        tokens, best = mx.argmax(logits, axis=-1), mx.max(logits, axis=-1).astype(mx.float32)
        self._tie_margin = tie_margin(eps)
        second = None
        if margins:
            others = mx.where(mx.arange(logits.shape[-1])[None] == tokens[:, None], -math.inf, logits)
            second = mx.max(others, axis=-1).astype(mx.float32)
        mx.eval(tokens, best, second)  # the one wait of a round
        logits_of_best: Any = best.tolist()
        require_finite(logits_of_best)
        self._best = logits_of_best
        self._tokens: Any = tokens.tolist()
        self._second: Any = None if second is None else second.tolist()

    def choose(self, row: int, depth: int) -> int:
        """The target's own token behind a row."""
        return int(self._tokens[row])

    def is_near_tie(self, row: int) -> bool:
        """Whether the two largest logits of a row are within what the order of summation may change."""
        return bool(self._best[row] - self._second[row] <= self._tie_margin * abs(self._best[row]))


class _Drawn:
    """One round's rows at a temperature: tokens and probabilities, computed row by row when they are asked for."""

    def __init__(self, processed: mx.array, proposal: Proposal, params: SamplingParams, position: int) -> None:
        """`processed`: logits [R, V] behind bias and penalties; `position`: of the token behind the anchor."""
        self._params = params
        self._weights = np.asarray(_weights(processed, params))  # waits for the device
        seed_at = params.seed, position, max(proposal.depths()) + 1
        self._draws = uniforms(*seed_at)
        self._acceptance_draws = uniforms(*seed_at, word=ACCEPTANCE) if proposal.drawn_from else None
        self._filtered: dict[int, NDArray[np.float32]] = {}  # row -> what the filters leave of its weights

    def choose(self, row: int, depth: int) -> int:
        """The target's own token behind a row."""
        return draw(self._row(row), float(self._draws[depth]))

    def accepts(self, row: int, token: int, drawn_from: DrawnFrom) -> bool:
        """Whether a token drawn from q stands behind a row of a chain: with probability min(1, p/q)."""
        assert self._acceptance_draws is not None
        return float(self._acceptance_draws[row]) * drawn_from.of(token) < float(self._shares(row)[token])

    def replacement(self, row: int, drawn_from: DrawnFrom) -> int:
        """A token from the residual (p - q)+; from p if nothing is left, which is rounding only."""
        q = SparseProbs(np.array(drawn_from.ids), np.array(drawn_from.probs, np.float32))
        return draw(residual(self._shares(row), q), float(self._draws[row]))

    def chances(self, path: Sequence[int], asked: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        """Probabilities of tokens behind the rows of a path; empty where nothing was asked."""
        return tuple(tuple(self._shares(row)[list(asked[row])].tolist()) for row in path) if asked else ()

    def _row(self, row: int) -> NDArray[np.float32]:
        """Probabilities [V] of a row up to a factor."""
        if row not in self._filtered:
            self._filtered[row] = _filtered(self._weights[row], self._params)
            require_finite((float(self._filtered[row].sum(dtype=np.float64)),))
        return self._filtered[row]

    def _shares(self, row: int) -> NDArray[np.float32]:
        """Probabilities [V] of a row."""
        weights = self._row(row)
        shares: NDArray[np.float32] = weights / weights.sum(dtype=np.float64).astype(np.float32)
        return shares


def _penalised(logits: mx.array, params: SamplingParams, table: Counts) -> mx.array:
    """Penalties on float32 [R, V]; a new array."""
    if not len(table.ids):
        return logits
    ids, counts = mx.array(table.ids.astype(np.int32)), mx.array(table.counts)
    values = logits[:, ids]
    if params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        values = mx.where(mx.array(table.seen), mx.where(values > 0, values / penalty, values * penalty), values)
    values = values - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts
    result: mx.array = mx.array(logits)
    result[:, ids] = values
    return result


def _weights(logits: mx.array, params: SamplingParams) -> mx.array:
    """Probabilities [R, V] in float32: temperature and top-k."""
    logits = logits.astype(mx.float32)
    temperature = max(params.temperature, float(np.finfo(np.float32).tiny))
    scaled = (logits - mx.max(logits, axis=-1, keepdims=True)) / temperature
    if 0 < params.top_k < scaled.shape[-1]:
        smallest = mx.min(mx.topk(scaled, params.top_k, axis=-1), axis=-1, keepdims=True)
        scaled = mx.where(scaled < smallest, -math.inf, scaled)
    return mx.softmax(scaled, axis=-1, precise=True)


def _filtered(probs: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float32]:
    """Top-p and min-p on one row [V]."""
    if params.top_p < 1:
        # Tokens below (1 - top_p) / V hold less than 1 - top_p together, so the nucleus is complete without them; half
        # of that bound leaves room for rounding. Sorting the rest is many times faster.
        candidates = probs[probs >= (1 - params.top_p) / (2 * len(probs))]
        ranked = np.sort(candidates)[::-1]
        if len(ranked):
            num_below = int((np.cumsum(ranked, dtype=np.float64) < params.top_p).sum())
            probs = np.where(probs < ranked[min(num_below, len(ranked) - 1)], np.float32(0), probs)
    if params.min_p > 0:
        probs = np.where(probs < np.float32(params.min_p) * probs.max(), np.float32(0), probs)
    return probs
