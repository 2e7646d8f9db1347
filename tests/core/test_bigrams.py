"""Counts of neighbouring tokens: counted right, read with care, and never more than a claim."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash.core.adaptive import AdaptiveDrafter
from dflash.core.bigrams import BIGRAMS_FILE, SMOOTHING, STRENGTH, Bigrams, read_bigrams
from dflash.core.cost import CostTracker
from dflash.core.memory import Memory
from dflash.errors import CheckpointError
from dflash.types import CandidateTable, Proposal
from tests.core.test_adaptive import GPU_LIKE, LOGITS, PROMPT, TableDrafter, Trees, generate
from tests.fakes import guess_sometimes, run_rounds, tokens_of
from tests.options import OPTIONS, with_option

SIZE = 12


def texts(seed: int = 0, length: int = 200) -> list[tuple[list[int], list[bool]]]:
    rng = np.random.default_rng(seed)
    return [([int(x) for x in rng.integers(0, SIZE, length)], [bool(x) for x in rng.random(length) < 0.7])]


def naive(given: list[tuple[list[int], list[bool]]]) -> tuple[Counter[int], Counter[tuple[int, int]]]:
    singles: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    for ids, is_answer in given:
        for place in range(1, len(ids)):
            if is_answer[place]:
                singles[ids[place]] += 1
                pairs[ids[place - 1], ids[place]] += 1
    return singles, pairs


@pytest.mark.parametrize("least", [1, 2, 3])
def test_ratios_equal_their_definition(least: int) -> None:
    """Fault: prompt tokens are counted, a pair is lost, turned round or kept though it is rare."""
    given = texts() + texts(1)
    singles, pairs = naive(given)
    found = Bigrams.count(given, least=least).ratios(np.arange(SIZE), np.arange(SIZE))
    assert any(count >= least for count in pairs.values())
    total = sum(singles.values())
    for a in range(SIZE):
        for b in range(SIZE):
            seen = pairs[a, b] if pairs[a, b] >= least else 0
            share = (singles[b] + 0.5) / total
            expected = (seen + SMOOTHING * share) / ((singles[a] + SMOOTHING) * share)
            assert found[a, b] == pytest.approx(expected)


def test_unknown_tokens_say_nothing() -> None:
    """Fault: an id beyond all counted ones is taken for another one, or is an error."""
    bigrams = Bigrams.count(texts(), least=1)
    ratios = bigrams.ratios(np.array([0, 10**6]), np.array([1, 10**6]))
    assert ratios[0, 0] != 1
    assert (ratios[0, 1], ratios[1, 0], ratios[1, 1]) == (1, 1, 1)


def test_tables_are_conditioned_on_the_slot_before() -> None:
    """Fault: probabilities beyond 1, the wrong axis, the first slot changed, or a draft's own transitions replaced."""
    bigrams = Bigrams.count(texts(), least=1)
    ids = [[1, 2, 3], [4, 5, 6], [7, 8, 1]]
    shares = [[0.5, 0.2, 0.1], [0.6, 0.3, 0.1], [0.4, 0.3, 0.0]]
    log_probs = [[math.log(max(p, 1e-30)) for p in row] for row in shares]
    table = bigrams.condition(CandidateTable(ids, log_probs))
    assert (table.ids, table.log_probs) == (ids, log_probs)
    assert table.transitions is not None
    assert len(table.transitions) == 2
    for slot, rows in enumerate(table.transitions):
        ratios = bigrams.ratios(np.array(ids[slot]), np.array(ids[slot + 1])) ** STRENGTH
        for a, row in enumerate(rows):
            weights = [p * ratios[a, b] for b, p in enumerate(shares[slot + 1])]
            rest = max(1 - sum(shares[slot + 1]), 1e-4)
            for b, score in enumerate(row):
                assert math.exp(score) == pytest.approx(weights[b] / (sum(weights) + rest), abs=1e-12)
            assert sum(map(math.exp, row)) <= 1
    assert bigrams.condition(table) is table
    empty = CandidateTable([], [])
    assert bigrams.condition(empty).ids == []
    assert Bigrams.count([]).condition(CandidateTable(ids, log_probs)).transitions is None


@pytest.mark.parametrize("trees", ["never", "always"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("option", OPTIONS)
def test_counts_never_change_the_tokens(option: str, temperature: float, trees: Trees) -> None:
    """Fault: a guess that is judged by its neighbour shows in the text."""
    params = with_option(option, temperature=temperature, max_new_tokens=30, seed=5)
    plain = tokens_of(run_rounds(LOGITS, PROMPT, params))
    draft = TableDrafter(guess_sometimes(LOGITS), 5)
    bigrams = Bigrams.count(texts(), least=1)
    memory = Memory(CostTracker(GPU_LIKE))
    drafter = AdaptiveDrafter(draft, memory, max_rows=9, trees=trees, bigrams=bigrams, clock=lambda: 0.0)
    rounds, target = generate(drafter, LOGITS, params, trees=trees != "never")
    assert tokens_of(rounds) == plain
    assert target.committed == (*PROMPT, *plain[:-1])


class _Undecided:
    """Claims 0.5 for token 3 and 0.45 for token 7, in every slot."""

    max_proposal = 3

    def observe(self, token_ids: Any, features: Any) -> None: ...

    def propose(self, anchor: int, budget: int) -> Proposal:
        raise AssertionError

    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        return CandidateTable([[3, 7]] * 3, [[math.log(0.5), math.log(0.45)]] * 3)


def test_neighbours_that_fit_go_before() -> None:
    """Fault: the counts reach no proposal. Of two candidates that the draft finds equal the one that follows the guess
    before it is fed; without counts the first one is, slot for slot."""
    bigrams = Bigrams.count([([3, 7, 3, 7] * 20, [True] * 80)])
    chains = []
    for counts in (None, bigrams):
        memory = Memory(CostTracker(GPU_LIKE))
        drafter = AdaptiveDrafter(_Undecided(), memory, max_rows=4, copies=False, bigrams=counts, clock=lambda: 0.0)
        drafter.observe([1, 2], None)
        chains.append(tuple(drafter.propose(5, 3).tokens))
    assert chains == [(3, 3, 3), (3, 7, 3)]


def test_a_file_gives_back_what_was_counted(tmp_path: Path) -> None:
    """Fault: a column is lost or shifted on the way through the file; no file is not "no counts"."""
    assert read_bigrams(tmp_path, SIZE) is None
    bigrams = Bigrams.count(texts(), least=1)
    (tmp_path / BIGRAMS_FILE).write_text(json.dumps(bigrams.to_json()))
    back = read_bigrams(tmp_path, SIZE)
    assert back is not None
    everything = np.arange(SIZE)
    assert np.array_equal(back.ratios(everything, everything), bigrams.ratios(everything, everything))
    (tmp_path / BIGRAMS_FILE).write_text(json.dumps(Bigrams.count([]).to_json()))
    assert read_bigrams(tmp_path, SIZE) is not None


TOKENS = {"ids": [1, 2], "counts": [3, 4]}
PAIRS = {"first": [1], "second": [2], "counts": [3]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not valid JSON"),
        ("[1, 2]", "must hold a JSON object"),
        ("{}", "'tokens' must hold"),
        ({"tokens": TOKENS}, "'pairs' must hold"),
        ({"tokens": {"ids": [], "counts": []}, "pairs": PAIRS}, "pairs and no tokens"),
        ({"tokens": TOKENS | {"counts": [0, 0]}, "pairs": PAIRS}, "pairs and no tokens"),
        ({"tokens": TOKENS, "pairs": [1]}, "'pairs' must hold"),
        ({"tokens": TOKENS, "pairs": PAIRS | {"counts": [1, 2]}}, "equally long"),
        ({"tokens": TOKENS, "pairs": PAIRS | {"counts": "3"}}, "whole numbers"),
        ({"tokens": TOKENS, "pairs": PAIRS | {"counts": [1.5]}}, "whole numbers"),
        ({"tokens": TOKENS, "pairs": PAIRS | {"counts": [True]}}, "whole numbers"),
        ({"tokens": TOKENS, "pairs": PAIRS | {"second": [-1]}}, "whole numbers"),
        ({"tokens": TOKENS, "pairs": PAIRS | {"second": [2**31]}}, "whole numbers"),
        ({"tokens": TOKENS, "pairs": PAIRS | {"second": [SIZE]}}, "outside the vocabulary"),
        ({"tokens": TOKENS | {"ids": [1, 1], "counts": [3, 0]}, "pairs": PAIRS}, "a token twice"),
        ({"tokens": {"ids": [SIZE], "counts": [1]}, "pairs": PAIRS}, "outside the vocabulary"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: Any, words: str) -> None:
    """Fault: a file from anywhere is a traceback, or is believed."""
    (tmp_path / BIGRAMS_FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(CheckpointError, match=words):
        read_bigrams(tmp_path, SIZE)


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    """Fault: a draft's folder makes us read another file of the machine."""
    (tmp_path / "secret").write_text("{}")
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / BIGRAMS_FILE).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="link out of its folder"):
        read_bigrams(folder, SIZE)


def peak_bytes(work: Callable[[], object]) -> int:
    """Most memory, NumPy's included, that `work` held at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("place", ["ids", "first", "second"])
def test_a_vocabulary_that_nobody_has_checked_costs_no_memory(tmp_path: Path, place: str) -> None:
    """Fault: a folder whose config claims a vocabulary near 2^31 has 16 GiB asked for by a file of 100 bytes, before
    anything says that no target has such a vocabulary."""
    highest = 2**31 - 2
    columns = {"ids": [1, 2], "first": [1], "second": [2]} | {place: [1, highest] if place == "ids" else [highest]}
    tokens = {"ids": columns["ids"], "counts": [3, 4]}
    pairs = {"first": columns["first"], "second": columns["second"], "counts": [3]}
    (tmp_path / BIGRAMS_FILE).write_text(json.dumps({"tokens": tokens, "pairs": pairs}))
    found: list[Bigrams | None] = []
    assert peak_bytes(lambda: found.append(read_bigrams(tmp_path, 2**31 - 1))) < 1 << 20
    assert found[0] is not None
    assert found[0].to_json() == {"tokens": tokens, "pairs": pairs}


def test_counting_takes_memory_by_what_is_counted() -> None:
    """Fault: one id of a vocabulary that only the draft's config claims makes counting as large as that."""
    high = 1 << 27
    found: list[Bigrams] = []
    assert peak_bytes(lambda: found.append(Bigrams.count([([1, high, 1, high], [True] * 4)], least=2))) < 1 << 20
    assert found[0].to_json() == {
        "tokens": {"ids": [1, high], "counts": [1, 2]},
        "pairs": {"first": [1], "second": [high], "counts": [2]},
    }
