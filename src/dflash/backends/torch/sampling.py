"""Acceptance on torch logits: the rules of `core/reference.py`, made cheap.

On the CPU rows are judged one at a time and only up to the first rejection, with NumPy's arg max (20 times
faster there than torch's on bf16, 7 times on fp32) and without sorting the vocabulary. On other devices all
rows are judged at once and read back in one transfer; but where there is no float64, in which probabilities are summed
(Apple's GPUs), rows are brought to the CPU and judged there. Knows nothing of drafters or of model state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dflash.core.draws import uniforms
from dflash.core.processing import Counts, Penalties, check_bias, has_penalties, require_finite
from dflash.core.tree import walk
from dflash.types import Acceptance, Proposal, SamplingParams, Verdict

_WITHOUT_FLOAT64 = frozenset({"mps"})


class TorchAcceptor:
    """The acceptor of one request: draws (or arg-maxes) the target's token of each row and compares.

    With point-mass proposals that is the exact acceptance rule at any temperature (docs/algorithm.md), and as the
    draws are keyed by position it gives the text of plain decoding with the same seed.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        row_by_row: bool | None = None,
    ) -> None:
        """`vocab_size`: width of the logits; `device`: where they are; `row_by_row`: judge rows one at a time
        (None = on the CPU). Raises ConfigError for a logit_bias that cannot be applied."""
        device = torch.device(device)
        if device.type in _WITHOUT_FLOAT64:
            device = torch.device("cpu")
        self._params = params
        self._device = device
        self._row_by_row = device.type == "cpu" if row_by_row is None else row_by_row
        self._position = len(prompt_ids)
        """Sequence position of the next token to be decided."""
        self._bias = _Bias(params, vocab_size, device) if params.logit_bias else None
        self._penalties = Penalties(params, prompt_ids) if has_penalties(params) else None

    def accept(self, proposal: Proposal, verdict: Verdict) -> Acceptance:
        """`verdict.logits`: [rows, V], the anchor's and one per draft token, any float dtype. Raises ModelError if the
        rows it reads are not finite."""
        logits: Tensor = verdict.logits.detach().to(self._device)
        assert logits.shape[0] == len(proposal.tokens) + 1, "one row per draft token and one for the anchor"
        acceptance = walk(proposal, self._chooser(proposal, logits))
        self._position += len(acceptance.path)
        if self._penalties is not None:
            self._penalties.extend((*proposal.along(acceptance.path), acceptance.next_token))
        return acceptance

    def _chooser(self, proposal: Proposal, logits: Tensor) -> Callable[[int, int], int]:
        """(row, depth) -> the target's own token of that row, computed when it is asked for where that is cheaper."""
        counts = None if self._penalties is None else self._penalties.counts(proposal)
        depths = proposal.depths()
        sampled = self._params.temperature > 0
        draws = uniforms(self._params.seed, self._position, max(depths) + 1) if sampled else None
        if not self._row_by_row:
            chosen = self._choose(self._process(logits, counts, slice(None)), None if draws is None else draws[depths])
            return lambda row, depth: chosen[row]

        def choose(row: int, depth: int) -> int:
            rows = slice(row, row + 1)
            processed = self._process(logits[rows], counts, rows)
            return self._choose(processed, None if draws is None else draws[depth : depth + 1])[0]

        return choose

    def _choose(self, processed: Tensor, draws: np.ndarray | None) -> list[int]:
        """The target's tokens of processed rows [R, V]: drawn with `draws` [R], or the arg max without."""
        if draws is not None:
            return _draw(_weights(processed, self._params), draws)
        if len(processed) == 1 and processed.device.type == "cpu":
            return [_greedy_row(processed)]
        return _greedy(processed)

    def _process(self, logits: Tensor, counts: Counts | None, rows: slice) -> Tensor:
        """Bias and penalties; float32 unless there is nothing to do. `logits` [R, V] are rows `rows`."""
        if self._bias is None and counts is None:
            return logits
        result = logits.to(torch.float32, copy=True)
        if self._bias is not None:
            self._bias.apply(result)
        if counts is not None:
            _apply_penalties(result, self._params, counts, rows)
        return result


class _Bias:
    """The request's logit bias as two vectors."""

    def __init__(self, params: SamplingParams, vocab_size: int, device: torch.device) -> None:
        check_bias(params, vocab_size)
        self._ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)  # [N]
        self._values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)  # [N]

    def apply(self, logits: Tensor) -> None:
        """In place on [R, V]."""
        logits[:, self._ids] += self._values


def _apply_penalties(logits: Tensor, params: SamplingParams, table: Counts, rows: slice) -> None:
    """In place on float32 [R, V], the rows `rows` of the table."""
    ids = torch.from_numpy(table.ids).to(logits.device)
    counts = torch.from_numpy(table.counts[rows]).to(logits.device)
    values = logits[:, ids]
    if params.repetition_penalty != 1:
        seen = torch.from_numpy(table.seen[rows]).to(logits.device)
        penalty = params.repetition_penalty
        values = torch.where(seen, torch.where(values > 0, values / penalty, values * penalty), values)
    values = values - params.presence_penalty * (counts > 0)
    logits[:, ids] = values - params.frequency_penalty * counts


def _greedy_row(logits: Tensor) -> int:
    """The arg max of [1, V] on the CPU; the first one of equals."""
    row = logits[0].to(torch.float32).numpy()  # NumPy has no bf16; widening keeps order and ties
    token = int(row.argmax())
    require_finite((float(row[token]),))
    return token


def _greedy(logits: Tensor) -> list[int]:
    """The arg max of each row of [R, V]; the first one of equals."""
    top = logits.max(dim=-1)
    values, tokens = torch.stack((top.values.double(), top.indices.double())).tolist()  # one transfer
    require_finite(values)
    return [int(token) for token in tokens]


def _weights(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [R, V] in float32 up to a factor per row: temperature, top-k, top-p, min-p."""
    logits = logits.to(torch.float32)
    temperature = max(params.temperature, torch.finfo(torch.float32).tiny)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    if 0 < params.top_k < scaled.shape[-1]:
        smallest = scaled.topk(params.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < smallest, -math.inf)
    probs = scaled.softmax(dim=-1)
    if params.top_p < 1:
        probs = probs.masked_fill(probs < _nucleus_edge(probs, params.top_p), 0)
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.amax(dim=-1, keepdim=True), 0)
    return probs


def _nucleus_edge(probs: Tensor, top_p: float) -> Tensor:
    """Probability of the least probable token inside the nucleus, [R, 1], for probabilities [R, V]."""
    candidates = probs
    if probs.shape[0] == 1:
        # Tokens below (1 - top_p) / V hold less than 1 - top_p together, so the nucleus is complete without
        # them; half of that bound leaves room for rounding. Sorting the rest is some 50 times faster.
        candidates = probs[probs >= (1 - top_p) / (2 * probs.shape[-1])].unsqueeze(0)
    ranked = candidates.sort(dim=-1, descending=True).values
    num_below = (ranked.double().cumsum(dim=-1) < top_p).sum(dim=-1, keepdim=True)
    return ranked.gather(-1, num_below.clamp(max=ranked.shape[-1] - 1))


def _draw(weights: Tensor, draws: np.ndarray) -> list[int]:
    """Inverse CDF in order of ids for weights [R, V] and draws [R] in [0, 1), summed in float64."""
    cumulative = weights.double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    aim = torch.from_numpy(draws).to(weights.device).unsqueeze(-1) * total
    aim = torch.minimum(aim, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, aim, right=True)
    totals, tokens = torch.stack((total.squeeze(-1), found.squeeze(-1).double())).tolist()  # one transfer
    require_finite(totals)
    return [int(token) for token in tokens]
