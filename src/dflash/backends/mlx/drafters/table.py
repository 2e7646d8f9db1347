"""From logits of slots to the candidates that core builds chains and trees from."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dflash.types import CandidateTable


def best_rows(scores: mx.array, count: int) -> mx.array:
    """Indices [..., count] of the largest of [..., K], best first and the first of equals: `count` passes, which for
    the few candidates that are asked for are several times faster than a partition."""
    found = []
    for _ in range(min(count, scores.shape[-1])):
        best = mx.argmax(scores, axis=-1, keepdims=True)
        found.append(best)
        scores = mx.put_along_axis(scores, best, mx.array(-mx.inf, scores.dtype), axis=-1)
    return mx.concatenate(found, axis=-1)


def candidate_table(logits_TK: mx.array, token_ids_K: mx.array | None, count: int) -> CandidateTable:
    """The `count` best candidates of each slot with their log-probabilities over all K rows.

    `token_ids_K`: target id of each row; None = row j is id j. Slots do not depend on one another, so the table has no
    transitions. Waits for the device once.
    """
    logits_TK = logits_TK.astype(mx.float32)
    rows_TC = best_rows(logits_TK, count)
    best_TC = mx.take_along_axis(logits_TK, rows_TC, axis=-1)
    log_probs_TC = best_TC - mx.logsumexp(logits_TK, axis=-1, keepdims=True)
    return on_host(rows_TC, token_ids_K, log_probs_TC)


def on_host(
    rows_TC: mx.array, token_ids_K: mx.array | None, log_probs_TC: mx.array, after_SCC: mx.array | None = None
) -> CandidateTable:
    """The table of these rows of the scored vocabulary, read in one go."""
    ids_TC = rows_TC if token_ids_K is None else token_ids_K[rows_TC]
    mx.eval([one for one in (ids_TC, log_probs_TC, after_SCC) if one is not None])
    ids: Any = ids_TC.tolist()
    log_probs: Any = log_probs_TC.tolist()
    if after_SCC is None:
        return CandidateTable(ids, log_probs)
    after: Any = after_SCC.tolist()
    return CandidateTable(ids, log_probs, after)
