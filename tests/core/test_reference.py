"""The NumPy specification: processing against hand-made numbers, acceptance against the exact law.

Chi-square tests use fixed random streams, so they cannot flicker: the right rule gives p > 0.01 for these
streams, and `test_the_chi_square_test_notices_a_wrong_rule` shows that known wrong rules give p < 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dflash.core.reference import (
    DraftProbs,
    FloatArray,
    SparseProbs,
    accept_greedy,
    accept_one_hot,
    accept_sampled,
    distribution,
    draw,
    process_logits,
    residual,
)
from dflash.types import Acceptance, SamplingParams

VOCAB = 5
NUM_SAMPLES = 12_000
FIRST = np.array([0.05, 0.4, 0.15, 0.3, 0.1], np.float32)
"""p of the first token."""
THEN = np.random.default_rng(0).dirichlet(np.ones(VOCAB), size=VOCAB).astype(np.float32)
"""p of the second token, a row per first token: a wrongly conditioned second token shows."""
AFTER = np.random.default_rng(5).dirichlet(np.ones(VOCAB), size=VOCAB).astype(np.float32)
"""p of the third token (the bonus row) given the second."""
Q_FIRST = np.array([0.3, 0.1, 0.3, 0.2, 0.1], np.float32)
Q_THEN = np.random.default_rng(1).dirichlet(np.ones(VOCAB), size=VOCAB).astype(np.float32)


def logs(values: Sequence[float]) -> FloatArray:
    return np.log(np.array(values, np.float32))


def test_bias_and_penalties_by_hand() -> None:
    """Guards against the wrong order, sign or scope: repetition sees prompt and output, the others only the output."""
    logits = np.array([2, -2, 1, 0, 3], np.float32)
    params = SamplingParams(
        repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={1: 6, 4: float("-inf")}
    )
    result = process_logits(logits, params, prompt_ids=[0, 4, 0], output_ids=[1, 2, 1])
    # 0: 2/2.  1: (-2+6)/2 - 0.5 - 2*0.25.  2: 1/2 - 0.5 - 0.25.  3: untouched.  4: banned.
    assert result.tolist() == [1, 1, -0.25, 0, -np.inf]
    assert logits.tolist() == [2, -2, 1, 0, 3], "the input must not change"


def test_repetition_penalty_multiplies_negative_logits() -> None:
    params = SamplingParams(repetition_penalty=2)
    assert process_logits(np.array([-1, -1], np.float32), params, [0], []).tolist() == [-2, -1]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=1), [0.1, 0.2, 0.4, 0.3]),
        (SamplingParams(temperature=0.5), [1 / 30, 4 / 30, 16 / 30, 9 / 30]),
        (SamplingParams(temperature=1, top_k=2), [0, 0, 4 / 7, 3 / 7]),
        (SamplingParams(temperature=1, top_k=9), [0.1, 0.2, 0.4, 0.3]),
        (SamplingParams(temperature=1, top_p=0.69), [0, 0, 4 / 7, 3 / 7]),
        (SamplingParams(temperature=1, top_p=0.71), [0, 2 / 9, 4 / 9, 3 / 9]),
        (SamplingParams(temperature=1, top_p=0.001), [0, 0, 1, 0]),
        (SamplingParams(temperature=1, min_p=0.45), [0, 2 / 9, 4 / 9, 3 / 9]),
        (SamplingParams(temperature=1, min_p=1), [0, 0, 1, 0]),
        # top-p counts after top-k: 4/7 of the two left reach 0.55; before top-k it would take both.
        (SamplingParams(temperature=1, top_k=2, top_p=0.55), [0, 0, 1, 0]),
        # temperature comes first: at 0.5 the best two hold 25/30.
        (SamplingParams(temperature=0.5, top_p=0.8), [0, 0, 16 / 25, 9 / 25]),
        (SamplingParams(temperature=1e-45), [0, 0, 1, 0]),
    ],
)
def test_filters_by_hand(params: SamplingParams, expected: list[float]) -> None:
    np.testing.assert_allclose(distribution(logs([0.1, 0.2, 0.4, 0.3]), params), expected, rtol=1e-5)


def test_ties_at_the_edge_all_stay() -> None:
    """Guards against results that depend on a sorting order, which differs between libraries and devices."""
    logits = logs([0.2, 0.3, 0.3, 0.2])
    for params in (SamplingParams(temperature=1, top_k=1), SamplingParams(temperature=1, top_p=0.2)):
        np.testing.assert_allclose(distribution(logits, params), [0, 0.5, 0.5, 0], rtol=1e-6)


def test_draw_is_inverse_cdf_and_never_draws_the_impossible() -> None:
    probs = np.array([0, 0.5, 0, 0.5, 0], np.float32)
    below_one = float(np.nextafter(1, 0))
    assert [draw(probs, u) for u in (0.0, 0.49, 0.5, 0.99, below_one)] == [1, 1, 3, 3, 3]
    # Unnormalised sums at which u * total rounds up to the total itself.
    for total in np.linspace(0.3, 3, 1000, dtype=np.float32):
        assert draw(np.array([0, total, 0], np.float32), below_one) == 1


def test_residual_of_equal_or_covering_q_falls_back_to_p() -> None:
    """Guards against a distribution of zeros or NaN."""
    p = np.array([0.25, 0.75, 0], np.float32)
    assert residual(p, p.copy()).tolist() == p.tolist()
    covering = SparseProbs(np.array([1, 0]), np.array([0.75, 0.25], np.float32))
    assert residual(p, covering).tolist() == p.tolist()
    assert accept_sampled([0], [p], np.stack([p, p]), [0.999], 0.0) == Acceptance.chain(1, 0)


def test_greedy_acceptance_by_hand() -> None:
    rows = np.eye(4, dtype=np.float32)[[2, 0, 3]]
    assert accept_greedy([2, 0], rows) == Acceptance.chain(2, 3)
    assert accept_greedy([2, 1], rows) == Acceptance.chain(1, 0)
    assert accept_greedy([0, 0], rows) == Acceptance.chain(0, 2)
    assert accept_greedy([], rows[:1]) == Acceptance.chain(0, 2)


def test_zero_probability_is_never_accepted_even_at_draw_zero() -> None:
    p = np.array([[0, 1], [0.5, 0.5]], np.float32)
    assert accept_sampled([0], [np.array([1, 0], np.float32)], p, [0.0], 0.3) == Acceptance.chain(0, 1)


# Distribution of whole texts -----------------------------------------------------------------------

Judge = Callable[[list[int], list[DraftProbs], FloatArray, NDArray[np.float64]], Acceptance]
"""(draft [2], its q [2], p [3, V], four uniforms) -> decision."""


def judge_sampled(draft: list[int], q: list[DraftProbs], p: FloatArray, draws: NDArray[np.float64]) -> Acceptance:
    return accept_sampled(draft, q, p, draws[:2].tolist(), float(draws[2]))


def judge_one_hot(draft: list[int], q: list[DraftProbs], p: FloatArray, draws: NDArray[np.float64]) -> Acceptance:
    return accept_one_hot(draft, p, draws[:3].tolist())


def judge_by_ratio_to_best(
    draft: list[int], q: list[DraftProbs], p: FloatArray, draws: NDArray[np.float64]
) -> Acceptance:
    """A fault that shipped elsewhere: accept with q(d) / max q."""
    for index, token in enumerate(draft):
        row = np.asarray(q[index])
        if draws[index] >= row[token] / row.max():
            return Acceptance.chain(index, draw(residual(p[index], row), float(draws[2])))
    return Acceptance.chain(2, draw(p[2], float(draws[2])))


def judge_without_residual(
    draft: list[int], q: list[DraftProbs], p: FloatArray, draws: NDArray[np.float64]
) -> Acceptance:
    """A fault: the replacement comes from p instead of the residual."""
    decision = accept_sampled(draft, q, p, draws[:2].tolist(), 0.5)
    return Acceptance.chain(decision.num_accepted, draw(p[decision.num_accepted], float(draws[2])))


def sparse(q: FloatArray) -> SparseProbs:
    """q restricted to its three best tokens."""
    ids = np.argsort(q)[-3:].astype(np.int64)
    return SparseProbs(ids, (q[ids] / q[ids].sum()).astype(np.float32))


def drawn_from(q: DraftProbs, value: float) -> int:
    return int(q.ids[draw(q.probs, value)]) if isinstance(q, SparseProbs) else draw(q, value)


def p_value_of_texts(judge: Judge, kind: str) -> float:
    """Chi-square p-value of the law of three-token texts against plain sampling (125 cells)."""
    rng = np.random.default_rng(11)
    counts = np.zeros((VOCAB, VOCAB, VOCAB))
    for draws in rng.random((NUM_SAMPLES, 8)):
        q_first, q_then = Q_FIRST, Q_THEN
        if kind == "one-hot":
            draft = [int(Q_FIRST.argmax())]
            draft.append(int(Q_THEN[draft[0]].argmax()))
            q: list[DraftProbs] = list(np.eye(VOCAB, dtype=np.float32)[draft])
        else:
            q = [sparse(q_first) if kind == "sparse" else q_first]
            draft = [drawn_from(q[0], draws[4])]
            q.append(sparse(q_then[draft[0]]) if kind == "sparse" else q_then[draft[0]])
            draft.append(drawn_from(q[1], draws[5]))
        p = np.stack([FIRST, THEN[draft[0]], AFTER[draft[1]]])
        decision = judge(draft, q, p, draws[:4])
        text = [*draft[: decision.num_accepted], decision.next_token]
        while len(text) < 3:  # later rounds are plain steps
            text.append(draw((THEN if len(text) == 1 else AFTER)[text[-1]], float(draws[5 + len(text)])))
        counts[tuple(text)] += 1
    expected = FIRST[:, None, None].astype(np.float64) * THEN[:, :, None] * AFTER[None]
    return chi_square(counts.ravel(), NUM_SAMPLES * expected.ravel() / expected.sum())


def chi_square(counts: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """p-value; cells with fewer than 5 expected events are merged."""
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


@pytest.mark.parametrize(
    ("judge", "kind"),
    [(judge_sampled, "dense"), (judge_sampled, "sparse"), (judge_sampled, "one-hot"), (judge_one_hot, "one-hot")],
)
def test_speculative_texts_have_the_law_of_plain_sampling(judge: Judge, kind: str) -> None:
    """Guards against every biased acceptance rule: dense, sparse and one-hot q."""
    assert p_value_of_texts(judge, kind) > 0.01


@pytest.mark.parametrize("judge", [judge_by_ratio_to_best, judge_without_residual])
def test_the_chi_square_test_notices_a_wrong_rule(judge: Judge) -> None:
    """Chance cannot pass the test above: rules that are biased by a few per cent fail it at once."""
    assert p_value_of_texts(judge, "dense") < 1e-6
