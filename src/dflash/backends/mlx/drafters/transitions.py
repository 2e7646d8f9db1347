"""Candidates of slots that depend on the token before them: for each slot the best ones after the greedy chain, and how
likely each is after each candidate of the slot before. `backends/torch/drafters/transitions.py` is what it is tested
against.

The first candidates of all slots are the greedy chain itself. Log-probabilities are those of the drafter's whole
distribution given that predecessor.
"""

from __future__ import annotations

import mlx.core as mx

from dflash.backends.mlx.draft_heads import CandidateSelector, MarkovHead
from dflash.backends.mlx.drafters.table import best_rows, on_host
from dflash.types import CandidateTable


def selected(
    selector: CandidateSelector,
    hidden_TH: mx.array,
    logits_TK: mx.array,
    tokens_K: mx.array | None,  # target id of each row; None = row j is id j
    anchor: int,
    *,
    num_scored: int,
    count: int,
) -> CandidateTable:
    """DFlash 2: the selector scores the `num_scored` best of each slot; beyond them a slot's own logits stand."""
    logits_TK = logits_TK.astype(mx.float32)
    num_scored = min(num_scored, logits_TK.shape[1])
    rows_TC = mx.argpartition(-logits_TK, kth=num_scored - 1, axis=-1)[:, :num_scored]
    unary_TC = mx.take_along_axis(logits_TK, rows_TC, axis=-1)
    tokens_TC = rows_TC if tokens_K is None else tokens_K[rows_TC]
    scores_TCC = selector(unary_TC, tokens_TC, hidden_TH, anchor).astype(mx.float32)
    # What lies beyond the candidates keeps its share of the distribution, whatever the predecessor.
    whole_T, scored_T = mx.logsumexp(logits_TK, axis=-1), mx.logsumexp(unary_TC, axis=-1)
    rest_T = whole_T + mx.log1p(-mx.minimum(mx.exp(scored_T - whole_T), 1 - 1e-7))
    after_TCC = scores_TCC - mx.logaddexp(mx.logsumexp(scores_TCC, axis=-1), rest_T[:, None])[..., None]
    return _best_first(rows_TC, tokens_K, after_TCC, min(count, num_scored))


def _best_first(rows_TC: mx.array, tokens_K: mx.array | None, after_TCC: mx.array, count: int) -> CandidateTable:
    """Order each slot's candidates by their score after the first one of the slot before, and keep `count`."""
    before = mx.array([0])
    rows, chances, tables = [], [], []
    for rows_C, after_CC in zip(rows_TC, after_TCC, strict=True):
        order = best_rows(after_CC[before[0]], count)
        rows.append(rows_C[order])
        chances.append(after_CC[before[0]][order])
        tables.append(after_CC[before][:, order])
        before = order
    after = mx.stack(tables[1:]) if len(tables) > 1 else None
    return on_host(mx.stack(rows), tokens_K, mx.stack(chances), after)


def markov(
    head: MarkovHead,
    weight_KR: mx.array,  # W2 of the scored rows
    hidden_TH: mx.array,
    logits_TK: mx.array,
    tokens_K: mx.array | None,
    anchor: int,
    *,
    count: int,
) -> CandidateTable:
    """DSpark: each slot once after every candidate of the slot before. A recurrent head's state is that of the greedy
    chain for all of them, so its rows off that chain are near, not exact; proposals may be anything."""
    count = min(count, logits_TK.shape[1])
    before_C = mx.array([anchor])
    state_R = mx.zeros((head.rank,), hidden_TH.dtype)
    rows, chances, tables = [], [], []
    for hidden_H, logits_K in zip(hidden_TH, logits_TK, strict=True):
        num = len(before_C)
        hidden_CH = mx.broadcast_to(hidden_H, (num, len(hidden_H)))
        latent_CR, states_CR = head.latent(before_C, hidden_CH, mx.broadcast_to(state_R, (num, head.rank)))
        scores_CK = (logits_K + latent_CR @ weight_KR.T).astype(mx.float32)
        after_CK = scores_CK - mx.logsumexp(scores_CK, axis=-1, keepdims=True)
        rows_C = best_rows(after_CK[0], count)
        rows.append(rows_C)
        chances.append(after_CK[0][rows_C])
        tables.append(after_CK[:, rows_C])
        state_R = states_CR[0]
        before_C = rows_C if tokens_K is None else tokens_K[rows_C]
    after = mx.stack(tables[1:]) if len(tables) > 1 else None
    return on_host(mx.stack(rows), tokens_K, mx.stack(chances), after)
