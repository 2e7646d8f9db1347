"""From logits of slots to the candidates that core builds chains and trees from."""

from __future__ import annotations

from torch import Tensor

from dflash.types import CandidateTable


def candidate_table(logits_TK: Tensor, token_ids_K: Tensor | None, count: int) -> CandidateTable:
    """The `count` best candidates of each slot with their log-probabilities over all K rows.

    `token_ids_K`: target id of each row; None = row j is id j. Slots do not depend on one another, so the table has no
    transitions. One pass over the logits for the normaliser, one for the best; two small transfers to the host.
    """
    logits_TK = logits_TK.float()
    best = logits_TK.topk(min(count, logits_TK.shape[1]), dim=-1)
    log_probs_TC = best.values - logits_TK.logsumexp(dim=-1, keepdim=True)
    ids_TC = best.indices if token_ids_K is None else token_ids_K[best.indices]
    return CandidateTable(ids_TC.tolist(), log_probs_TC.tolist())
