"""Acceptance on MLX logits: the rules of `core/reference.py`, with one wait for the device per round.

Greedy rows are compared on the device and only token ids are read. At a temperature the device gives the rows' weights
(on Apple silicon the host reads them in place), and NumPy draws from them in float64, which MLX's GPUs do not have, one
row at a time and only up to the first rejection. Knows nothing of drafters or of model state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from dflash.core.draws import uniforms
from dflash.core.processing import Counts, Penalties, check_bias, has_penalties, require_finite
from dflash.core.reference import draw
from dflash.core.tree import walk
from dflash.types import Acceptance, Proposal, SamplingParams, Verdict


class MLXAcceptor:
    """The acceptor of one request: draws (or arg-maxes) the target's token of each row and compares.

    With point-mass proposals that is the exact acceptance rule at any temperature (docs/algorithm.md), and as the
    draws are keyed by position it gives the text of plain decoding with the same seed.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int) -> None:
        """`vocab_size`: width of the logits. Raises ConfigError for a logit_bias that cannot be applied."""
        self._params = params
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
        choose = self._drawn(proposal, processed) if self._params.temperature > 0 else _greedy(processed)
        acceptance = walk(proposal, choose)
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

    def _drawn(self, proposal: Proposal, processed: mx.array) -> Callable[[int, int], int]:
        """(row, depth) -> the target's token of that row, drawn when it is asked for."""
        weights = np.asarray(_weights(processed, self._params))  # waits for the device
        draws = uniforms(self._params.seed, self._position, max(proposal.depths()) + 1)

        def choose(row: int, depth: int) -> int:
            probs = _filtered(weights[row], self._params)
            require_finite((float(probs.sum(dtype=np.float64)),))
            return draw(probs, float(draws[depth]))

        return choose


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


def _greedy(logits: mx.array) -> Callable[[int, int], int]:
    """The arg max of each row of [R, V]; the first one of equals."""
    tokens, best = mx.argmax(logits, axis=-1), mx.max(logits, axis=-1).astype(mx.float32)
    mx.eval(tokens, best)  # the one wait of a round
    logits_of_best: Any = best.tolist()
    require_finite(logits_of_best)
    chosen: Any = tokens.tolist()
    return lambda row, depth: int(chosen[row])


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
