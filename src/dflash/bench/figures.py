"""From batches to figures: one cell per data set and load, one column per form. Pure functions over the record's parts.

A speed-up compares the same questions on both sides: a question that failed in one form is left out of the other, too.
Its denominator is the plain form that was fastest in this cell, whichever that is.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dflash.bench.record import (
    BatchPart,
    CellPart,
    FormFigures,
    FormPart,
    LoadPart,
    RequestPart,
    RoundsPart,
    Span,
    SpeedupPart,
)
from dflash.bench.sameness import compare_outputs, num_unsteady

Basis = Literal["decoding", "whole answers", "throughput"]
NUM_DRAWS = 2000
"""Draws of the bootstrap over prompts; its generator's seed is fixed, so that a report repeats itself."""
MIN_PROMPTS_FOR_INTERVAL = 3
_PERCENTILES = (5, 95)


@dataclass
class _Column:
    """Everything that one form brought in one cell."""

    form: FormPart
    batches: list[BatchPart] = field(default_factory=list)

    @property
    def requests(self) -> list[tuple[int, RequestPart]]:
        """(repeat, request) of all."""
        return [(batch.repeat, request) for batch in self.batches for request in batch.requests]

    @property
    def done(self) -> list[tuple[int, RequestPart]]:
        """Those that were answered."""
        return [(repeat, request) for repeat, request in self.requests if request.failure is None]


def cells(batches: Sequence[BatchPart], forms: Sequence[FormPart], *, compare_drawn: bool | None) -> list[CellPart]:
    """All figures.

    Args:
        compare_drawn: at a temperature above 0, whether outputs of one seed must be equal between forms; None = greedy.
    """
    columns: dict[tuple[str, str], dict[str, _Column]] = {}
    loads: dict[str, LoadPart] = {}
    for batch in batches:
        loads[batch.load.label] = batch.load
        cell = columns.setdefault((batch.data_set, batch.load.label), {form.name: _Column(form) for form in forms})
        cell[batch.form].batches.append(batch)
    return [
        _cell(data_set, loads[label], list(by_form.values()), compare_drawn)
        for (data_set, label), by_form in columns.items()
    ]


def _cell(data_set: str, load: LoadPart, columns: list[_Column], compare_drawn: bool | None) -> CellPart:
    plain = fastest_plain(columns, load)
    return CellPart(
        data_set=data_set,
        load=load,
        fastest_plain=plain.form.name if plain else None,
        forms=[_figures(column, columns, plain, load, compare_drawn) for column in columns],
    )


def fastest_plain(columns: Sequence[_Column], load: LoadPart) -> _Column | None:
    """The plain form with the highest median speed, over questions that all plain forms answered."""
    plain = [column for column in columns if column.form.kind == "plain" and column.done]
    if not plain:
        return None
    common = set.intersection(*(_keys(column) for column in plain))
    basis = _basis(plain, load)

    def speed(column: _Column) -> float:
        speeds = _speeds(column, basis, common)
        return statistics.median(speeds.values()) if speeds else 0.0

    return max(plain, key=speed)


def _figures(
    column: _Column, columns: list[_Column], plain: _Column | None, load: LoadPart, compare_drawn: bool | None
) -> FormFigures:
    requests, done = column.requests, [request for _, request in column.done]
    rounds = pooled_rounds(column)
    shares = [request.share for request in done if request.share is not None]
    num_share = sum(share.num for share in shares)
    reference = next((other for other in columns if other.form.name == column.form.reference), plain)
    speculative = column.form.kind == "speculative"
    compared = speculative and reference is not None and compare_drawn is not False
    tokens = [request.num_tokens for request in done]
    return FormFigures(
        form=column.form.name,
        num_requests=len(requests),
        num_done=len(done),
        failures=dict(Counter(request.failure for _, request in requests if request.failure is not None)),
        num_tokens=None if not done or any(number is None for number in tokens) else sum(filter(None, tokens)),
        decode_tokens_per_second=span(_speeds(column, "decoding", None).values()),
        tokens_per_second=span(_speeds(column, "whole answers" if load.sequential else "throughput", None).values()),
        first_token_seconds=spread(request.first_token_seconds for request in done),
        seconds_per_token=spread(seconds_per_token(request) for request in done),
        rounds=rounds if speculative else None,
        acceptance_length=rounds.acceptance_length if rounds and speculative else None,
        looping_share=sum(share.looping for share in shares) / num_share if num_share else None,
        copied_share=sum(share.copied for share in shares) / num_share if num_share else None,
        repeated_share=sum(share.repeated for share in shares) / num_share if num_share else None,
        share_unit=shares[0].unit if shares else None,
        peak_memory_bytes=max(filter(None, (batch.peak_memory_bytes for batch in column.batches)), default=None),
        num_unsteady=num_unsteady(column.done) if compare_drawn is None else None,
        identity=compare_outputs(column.done, reference.done, reference.form.name) if compared and reference else None,
        speedup=speedup(column, plain, load) if speculative and plain else None,
    )


def speedup(column: _Column, plain: _Column, load: LoadPart) -> SpeedupPart | None:
    """One form over another; None if there is no question (or, where requests overlap, no repeat) that both have."""
    basis = _basis([plain, column], load)
    common = _keys(plain) & _keys(column)
    ours, theirs = _speeds(column, basis, common), _speeds(plain, basis, common)
    ratios = span(ours[repeat] / theirs[repeat] for repeat in sorted(ours.keys() & theirs.keys()))
    if ratios is None:
        return None
    return SpeedupPart(
        over=plain.form.name,
        basis=basis,
        repeats=ratios,
        interval=None if basis == "throughput" else bootstrap(column, plain, basis, common),
        limit=None if basis != "decoding" else limit(column, plain, common),
        num_prompts=len({prompt for _, prompt, _ in common}),
    )


def _basis(columns: Sequence[_Column], load: LoadPart) -> Basis:
    if not load.sequential:
        return "throughput"
    told = all(request.decode_seconds is not None for column in columns for _, request in column.done)
    return "decoding" if told else "whole answers"


_Key = tuple[int, str, int]


def _keys(column: _Column) -> set[_Key]:
    """(repeat, prompt, turn) of what was answered and counted."""
    return {(repeat, *request.key) for repeat, request in column.done if request.num_tokens is not None}


def _cost(request: RequestPart, basis: Basis) -> tuple[int, float] | None:
    """(tokens, seconds) that count; None if it does not tell. A single token took no decoding."""
    if request.num_tokens is None:
        return None
    if basis == "decoding":
        return None if request.decode_seconds is None else (request.num_tokens - 1, request.decode_seconds)
    return None if request.total_seconds is None else (request.num_tokens, request.total_seconds)


def _speeds(column: _Column, basis: Basis, common: set[_Key] | None) -> dict[int, float]:
    """Repeat -> tokens per second over all (or the common) questions."""
    if basis == "throughput":
        return _throughputs(column)
    sums: dict[int, tuple[int, float]] = {}
    for repeat, request in column.done:
        if common is not None and (repeat, *request.key) not in common:
            continue
        if (cost := _cost(request, basis)) is None:
            continue
        tokens, seconds = sums.get(repeat, (0, 0.0))
        sums[repeat] = (tokens + cost[0], seconds + cost[1])
    return {repeat: tokens / seconds for repeat, (tokens, seconds) in sorted(sums.items()) if tokens and seconds > 0}


def _throughputs(column: _Column) -> dict[int, float]:
    """Repeat -> tokens of all answers over the batch's wall time; batches that were cut short do not count."""
    found = {}
    for batch in column.batches:
        numbers = [request.num_tokens for request in batch.requests if request.failure is None]
        if batch.complete and numbers and None not in numbers and batch.wall_seconds > 0:
            found[batch.repeat] = sum(filter(None, numbers)) / batch.wall_seconds
    return dict(sorted(found.items()))


def bootstrap(column: _Column, plain: _Column, basis: Basis, common: set[_Key]) -> tuple[float, float] | None:
    """95 % interval of the ratio of speeds when prompts are drawn with replacement, all repeats pooled."""
    ours, theirs = (_sums_by_prompt(one, basis, common) for one in (column, plain))
    prompts = sorted(ours.keys() & theirs.keys())
    if len(prompts) < MIN_PROMPTS_FOR_INTERVAL:
        return None
    sums = np.array([[*ours[prompt], *theirs[prompt]] for prompt in prompts])  # [prompts, 4]
    draws = np.random.default_rng(0).integers(len(prompts), size=(NUM_DRAWS, len(prompts)))
    our_tokens, our_seconds, their_tokens, their_seconds = sums[draws].sum(axis=1).T
    usable = (our_tokens > 0) & (their_tokens > 0)
    if not usable.any():
        return None
    ratios = (our_tokens * their_seconds)[usable] / (our_seconds * their_tokens)[usable]
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


def _sums_by_prompt(column: _Column, basis: Basis, common: set[_Key]) -> dict[str, tuple[int, float]]:
    sums: dict[str, tuple[int, float]] = {}
    for repeat, request in column.done:
        cost = _cost(request, basis)
        if cost is None or (repeat, *request.key) not in common:
            continue
        tokens, seconds = sums.get(request.prompt_id, (0, 0.0))
        sums[request.prompt_id] = (tokens + cost[0], seconds + cost[1])
    return sums


def limit(column: _Column, plain: _Column, common: set[_Key]) -> float | None:
    """tau * t1 / (t_draft + t_verify): the speed-up if a round cost its two forwards and nothing else."""
    rounds = pooled_rounds(column)
    plain_speeds = _speeds(plain, "decoding", common)
    if rounds is None or not plain_speeds or rounds.draft_seconds is None or rounds.verify_seconds is None:
        return None
    forwards = rounds.draft_seconds + rounds.verify_seconds
    if not rounds.num_rounds or forwards <= 0:
        return None
    return rounds.num_tokens / forwards / statistics.median(plain_speeds.values())


def pooled_rounds(column: _Column) -> RoundsPart | None:
    """All rounds of a form: as its answers told them, else as the server's counters did; None if neither."""
    told = [request.rounds for _, request in column.done if request.rounds is not None]
    counted = [batch.counters for batch in column.batches if batch.counters is not None]
    parts = told or counted
    if not parts:
        return None

    def total(name: str) -> float | None:
        values = [getattr(part, name) for part in parts]
        return None if None in values else sum(values)

    told_lengths = [part.lengths for part in parts if part.lengths is not None]
    lengths: Counter[int] = Counter()
    for one in told_lengths:
        lengths.update(one)
    return RoundsPart(
        num_rounds=sum(part.num_rounds for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        lengths=dict(sorted(lengths.items())) if len(told_lengths) == len(parts) else None,
        num_proposed=_whole(total("num_proposed")),
        num_accepted=_whole(total("num_accepted")),
        proposed_per_slot=_sum_slots([part.proposed_per_slot for part in parts]),
        accepted_per_slot=_sum_slots([part.accepted_per_slot for part in parts]),
        accepted_by_source=_sum_sources(parts),
        draft_seconds=total("draft_seconds"),
        verify_seconds=total("verify_seconds"),
        other_seconds=total("other_seconds"),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _sum_sources(parts: Sequence[RoundsPart]) -> dict[str, int] | None:
    """None if no part tells sources; a part without accepted tokens has none to tell."""
    sources: Counter[str] = Counter()
    for part in parts:
        sources.update(part.accepted_by_source or {})
    return dict(sorted(sources.items())) or None


def _sum_slots(slots: Sequence[list[int] | None]) -> list[int] | None:
    known = [one for one in slots if one is not None]
    if len(known) < len(slots):
        return None
    return [sum(one[i] for one in known if i < len(one)) for i in range(max(map(len, known), default=0))]


def seconds_per_token(request: RequestPart) -> float | None:
    """Time per output token after the first one."""
    if request.decode_seconds is None or request.num_tokens is None or request.num_tokens < 2:
        return None
    return request.decode_seconds / (request.num_tokens - 1)


def span(values: Iterable[float]) -> Span | None:
    """Median, least and greatest; None of nothing."""
    known = list(values)
    if not known:
        return None
    return Span(median=statistics.median(known), low=min(known), high=max(known), values=known)


def spread(values: Iterable[float | None]) -> Span | None:
    """Median, 5th and 95th percentile of those that are told; None of nothing."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, high = np.percentile(known, _PERCENTILES)
    return Span(median=statistics.median(known), low=float(low), high=float(high), values=[])
