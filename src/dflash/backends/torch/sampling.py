"""Acceptance on torch logits: the rules of `core/reference.py`, made cheap.

On the CPU rows are judged one at a time and only up to the first rejection, with NumPy's arg max (20 times
faster there than torch's on bf16, 7 times on fp32) and without sorting the vocabulary. On other devices all
rows are judged at once and read back in one transfer; but where there is no float64, in which probabilities are summed
(Apple's GPUs), rows are brought to the CPU and judged there. Knows nothing of drafters or of model state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dflash.core.draws import ACCEPTANCE, uniforms
from dflash.core.processing import Counts, Penalties, check_bias, has_penalties, require_finite
from dflash.core.tree import tie_margin, undecided, walk, walk_drawn
from dflash.types import Acceptance, DrawnFrom, Proposal, SamplingParams, Verdict

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
        computed_in: torch.dtype | None = None,
    ) -> None:
        """`vocab_size`: width of the logits; `device`: where they are; `row_by_row`: judge rows one at a time
        (None = on the CPU); `computed_in`: the model's dtype, where its logits may come in a wider one. Raises
        ConfigError for a logit_bias that cannot be applied."""
        device = torch.device(device)
        if device.type in _WITHOUT_FLOAT64:
            device = torch.device("cpu")
        self._params = params
        self._device = device
        self._row_by_row = device.type == "cpu" if row_by_row is None else row_by_row
        self._eps = 0.0 if computed_in is None else torch.finfo(computed_in).eps
        self._position = len(prompt_ids)
        """Sequence position of the next token to be decided."""
        self._bias = _Bias(params, vocab_size, device) if params.logit_bias else None
        self._penalties = Penalties(params, prompt_ids) if has_penalties(params) else None

    def accept(self, proposal: Proposal, verdict: Verdict) -> Acceptance:
        """`verdict.logits`: [rows, V], the anchor's and one per draft token, any float dtype. Raises ModelError if the
        rows it reads are not finite."""
        logits: Tensor = verdict.logits.detach().to(self._device)
        assert logits.shape[0] == len(proposal.tokens) + 1, "one row per draft token and one for the anchor"
        processor = self._processor(proposal, logits)
        eps = max(self._eps, torch.finfo(logits.dtype).eps)
        judge = _Judge(processor, proposal, self._params, self._position, row_by_row=self._row_by_row, eps=eps)
        sampled = self._params.temperature > 0
        if sampled and proposal.drawn_from:
            acceptance = walk_drawn(proposal, judge.choose, judge.accepts, judge.replacement)
        else:
            acceptance = walk(proposal, judge.choose)
            if proposal.parents is not None and not sampled:
                acceptance = undecided(proposal, acceptance, judge.is_near_tie)
        if sampled and proposal.asked:
            acceptance = replace(acceptance, chances=judge.chances(acceptance.path, proposal.asked))
        self._position += len(acceptance.path)
        if self._penalties is not None:
            self._penalties.extend((*proposal.along(acceptance.path), acceptance.next_token))
        return acceptance

    def _processor(self, proposal: Proposal, logits: Tensor) -> Callable[[slice], Tensor]:
        """Rows -> their processed logits."""
        counts = None if self._penalties is None else self._penalties.counts(proposal)
        return lambda rows: self._process(logits[rows], counts, rows)

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


class _Judge:
    """One round's rows: the target's tokens and probabilities, computed when they are asked for, one row at a time or
    all at once."""

    def __init__(
        self,
        process: Callable[[slice], Tensor],  # rows -> processed logits [R, V]
        proposal: Proposal,
        params: SamplingParams,
        position: int,
        *,
        row_by_row: bool,
        eps: float,
    ) -> None:
        """`position`: of the token behind the anchor; `eps`: of the dtype that the logits were computed in."""
        self._tie_margin = tie_margin(eps)
        self._process, self._params, self._row_by_row = process, params, row_by_row
        self._depths = proposal.depths()
        self._seed_at = params.seed, position, max(self._depths) + 1
        self._draws = uniforms(*self._seed_at) if params.temperature > 0 else None
        self._acceptance_draws = uniforms(*self._seed_at, word=ACCEPTANCE) if proposal.drawn_from else None
        self._weights: dict[int, Tensor] = {}  # row -> [1, V]
        self._chosen: list[int] | None = None  # of all rows

    def choose(self, row: int, depth: int) -> int:
        """The target's own token behind a row."""
        if self._row_by_row:
            if self._draws is not None:
                return _draw(self._row(row), self._draws[depth : depth + 1])[0]
            processed = self._process(slice(row, row + 1))
            return _greedy_row(processed) if processed.device.type == "cpu" else _greedy(processed)[0]
        if self._chosen is None:
            processed = self._process(slice(None))
            if self._draws is None:
                self._chosen = _greedy(processed)
            else:
                weights = _weights(processed, self._params)
                self._weights = dict(enumerate(weights.split(1)))
                self._chosen = _draw(weights, self._draws[self._depths])
        return self._chosen[row]

    def is_near_tie(self, row: int) -> bool:
        """Whether the two largest logits of a row are within what the order of summation may change (greedy)."""
        two = self._process(slice(row, row + 1))[0].float().topk(2).values.tolist()
        return bool(two[0] - two[1] <= self._tie_margin * abs(two[0]))

    def accepts(self, row: int, token: int, drawn_from: DrawnFrom) -> bool:
        """Whether a token drawn from q stands behind a row of a chain: with probability min(1, p/q)."""
        assert self._acceptance_draws is not None
        weights = self._row(row)[0]
        share = float(weights[token] / weights.sum())
        return float(self._acceptance_draws[row]) * drawn_from.of(token) < share

    def replacement(self, row: int, drawn_from: DrawnFrom) -> int:
        """A token from the residual (p - q)+; from p if nothing is left, which is rounding only."""
        assert self._draws is not None
        weights = self._row(row)
        probs = weights / weights.sum()
        rest = probs.clone()
        rest[0, list(drawn_from.ids)] -= torch.tensor(drawn_from.probs, dtype=rest.dtype, device=rest.device)
        rest.clamp_(min=0)
        return _draw(rest if float(rest.sum()) > 0 else probs, self._draws[row : row + 1])[0]

    def chances(self, path: Sequence[int], asked: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        """Probabilities of tokens behind the rows of a path."""
        found = []
        for row in path:
            weights = self._row(row)[0]
            ids = list(asked[row])
            found.append(tuple((weights[ids] / weights.sum()).tolist()) if ids else ())
        return tuple(found)

    def _row(self, row: int) -> Tensor:
        """Probabilities [1, V] of a row up to a factor."""
        if row not in self._weights:
            self._weights[row] = _weights(self._process(slice(row, row + 1)), self._params)
        return self._weights[row]


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
