"""Candidates of slots that depend on the token before them: for each slot the best ones after the greedy chain, and how
likely each is after each candidate of the slot before.

The first candidates of all slots are the greedy chain itself. Log-probabilities are those of the drafter's whole
distribution given that predecessor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dflash.backends.torch.draft_heads import CandidateSelector, MarkovHead
from dflash.types import CandidateTable


class Transitions(NamedTuple):
    """Candidates best first, [T][C] each."""

    rows_TC: Tensor
    """Rows of the scored vocabulary."""
    log_probs_TC: Tensor
    """After the first candidate of the slot before (of the first slot: after the anchor)."""
    after_SCC: Tensor
    """[T - 1, C, C]: of candidate b of slot t + 1 after candidate a of slot t."""

    def as_table(self, tokens_K: Tensor | None) -> CandidateTable:
        """For core, on the host; `tokens_K`: target id of each row, None = row j is id j."""
        ids_TC = self.rows_TC if tokens_K is None else tokens_K[self.rows_TC]
        return CandidateTable(ids_TC.tolist(), self.log_probs_TC.tolist(), self.after_SCC.tolist())


def selected(
    selector: CandidateSelector,
    hidden_TH: Tensor,
    logits_TK: Tensor,
    tokens_K: Tensor | None,  # target id of each row; None = row j is id j
    anchor: int,
    *,
    num_scored: int,
    count: int,
) -> Transitions:
    """DFlash 2: the selector scores the `num_scored` best of each slot; beyond them a slot's own logits stand."""
    unary_TC, rows_TC = logits_TK.float().topk(min(num_scored, logits_TK.shape[1]), dim=-1)
    tokens_TC = rows_TC if tokens_K is None else tokens_K[rows_TC]
    scores_TCC = selector(unary_TC, tokens_TC, hidden_TH, torch.tensor([anchor], device=rows_TC.device)).float()
    # What lies beyond the candidates keeps its share of the distribution, whatever the predecessor.
    whole, scored = logits_TK.float().logsumexp(-1), unary_TC.logsumexp(-1)
    rest_T = whole + torch.log1p(-(scored - whole).exp().clamp(max=1 - 1e-7))
    after_TCC = scores_TCC - torch.logaddexp(scores_TCC.logsumexp(-1), rest_T[:, None])[..., None]
    return _best_first(rows_TC, after_TCC, min(count, rows_TC.shape[1]))


def _best_first(rows_TC: Tensor, after_TCC: Tensor, count: int) -> Transitions:
    """Order each slot's candidates by their score after the first one of the slot before, and keep `count`."""
    before = torch.zeros(1, dtype=torch.long, device=rows_TC.device)
    rows, chances, tables = [], [], []
    for rows_C, after_CC in zip(rows_TC, after_TCC, strict=True):
        order = after_CC[before[0]].argsort(descending=True, stable=True)[:count]
        rows.append(rows_C[order])
        chances.append(after_CC[before[0]][order])
        tables.append(after_CC[before][:, order])
        before = order
    size = rows_TC.shape[0] - 1
    after = torch.stack(tables[1:]) if size else after_TCC.new_zeros(0, count, count)
    return Transitions(torch.stack(rows), torch.stack(chances), after)


def markov(
    head: MarkovHead,
    weight_KR: Tensor,  # W2 of the scored rows
    hidden_TH: Tensor,
    logits_TK: Tensor,
    tokens_K: Tensor | None,
    anchor: int,
    *,
    count: int,
) -> Transitions:
    """DSpark: each slot once after every candidate of the slot before. A recurrent head's state is that of the greedy
    chain for all of them, so its rows off that chain are near, not exact; proposals may be anything."""
    count = min(count, logits_TK.shape[1])
    before_C = torch.tensor([anchor], device=hidden_TH.device)
    state_R = head.start(hidden_TH[0])
    rows, chances, tables = [], [], []
    for hidden_H, logits_K in zip(hidden_TH, logits_TK, strict=True):
        num = len(before_C)
        latent_CR, states_CR = head.latent(before_C, hidden_H.expand(num, -1), state_R.expand(num, -1))
        after_CK = (logits_K + latent_CR @ weight_KR.T).float().log_softmax(-1)
        chances_C, rows_C = after_CK[0].topk(count)
        rows.append(rows_C)
        chances.append(chances_C)
        tables.append(after_CK[:, rows_C])
        state_R = states_CR[0]
        before_C = rows_C if tokens_K is None else tokens_K[rows_C]
    size = len(rows) - 1
    after = torch.stack(tables[1:]) if size else logits_TK.new_zeros(0, count, count)
    return Transitions(torch.stack(rows), torch.stack(chances), after)
