"""Which tokens follow one another in the target's answers: counts beside a draft, and what they say about its guesses.

A one-pass draft guesses every slot without knowing what it guesses for the slot before, so that neighbours may not fit
together. How much likelier a token is behind its neighbour than anywhere, counted once in the answers that the draft
learnt from, repairs that: with p the draft's own probability of a candidate, c counts and N their sum,

    p(b | a)  ~  p(b) * ratio(a, b) ** STRENGTH        ratio(a, b) = (c(a, b) + S u) / ((c(a) + S) u),  u = c(b) / N

It costs one look-up per pair of candidates and no forward. Only a claim is changed, so texts stay what they are; the
weights stay what other engines read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash.core.safetensors_files import inside, read_json
from dflash.errors import CheckpointError
from dflash.types import CandidateTable

BIGRAMS_FILE = "draft_bigrams.json"
"""Not in safetensors: other engines read every file of that name's end in a draft's folder as weights."""
STRENGTH, SMOOTHING = 0.35, 20.0
"""Replayed on recorded answers of smollm2-135m, 0.2 to 0.5 and 5 to 100 give the same speed-up within 1 %."""
LEAST_COUNT, MOST_PAIRS = 3, 500_000
"""Pairs that are kept: those seen as often (fewer add nothing), and of these the most frequent ones, some 8 MB."""
_MAX_BYTES = 16 << 20
_IDS = 1 << 31
"""Ids that a pair's key has room for."""
_LEAST_REST = 1e-4
"""Probability that is left, at least, to what is no candidate."""


@dataclass(frozen=True, eq=False)
class Bigrams:
    """Counts of tokens and of pairs of neighbours: as many numbers as were counted, whatever the vocabulary."""

    token_ids: NDArray[np.int64]
    """[T] ids that occur, below 2^31."""
    token_counts: NDArray[np.int64]
    """[T] occurrences of each."""
    pair_keys: NDArray[np.int64]
    """[P] first id * 2^31 + second id, ascending."""
    pair_counts: NDArray[np.int64]
    """[P] occurrences of each pair."""

    @cached_property
    def num_tokens(self) -> int:
        """N: tokens that were counted."""
        return int(self.token_counts.sum())

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        """[V or less] c of every id. Made when a draft's candidates are judged and not before: a vocabulary of a
        draft's files may have any size, that of a pair which was checked has the target's."""
        ids = self.token_ids, self.pair_keys // _IDS, self.pair_keys % _IDS
        counts = np.zeros(1 + max(int(column.max(initial=-1)) for column in ids), np.int64)
        counts[self.token_ids] = self.token_counts
        return counts

    @classmethod
    def count(cls, texts: Iterable[tuple[ArrayLike, ArrayLike]], *, least: int = LEAST_COUNT) -> Self:
        """Of texts ([S] token ids from 0 on, [S] whether each is an answer's); a pair counts if its second one is."""
        firsts, seconds = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for ids, is_answer in texts:
            row, counts_here = np.asarray(ids, np.int64), np.asarray(is_answer, np.bool_)[1:]
            firsts.append(row[:-1][counts_here])
            seconds.append(row[1:][counts_here])
        first, second = np.concatenate(firsts), np.concatenate(seconds)
        keys, counts = np.unique(first * _IDS + second, return_counts=True)
        frequent = np.argsort(-counts, kind="stable")[: min(MOST_PAIRS, int((counts >= least).sum()))]
        kept = np.sort(frequent)
        return cls(*np.unique(second, return_counts=True), keys[kept], counts[kept])

    def ratios(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.float64]:
        """ratio(a, b) of ids [A] and [B] as [A, B]: 1 = a says nothing about b."""
        size = len(self._counts)
        known = (first < size)[:, None] & (second < size)[None]
        a, b = np.minimum(first, size - 1)[:, None], np.minimum(second, size - 1)[None]
        keys = a * _IDS + b
        places = np.searchsorted(self.pair_keys[:-1], keys)
        pairs = np.where(self.pair_keys[places] == keys, self.pair_counts[places], 0)
        share = (self._counts[b] + 0.5) / self.num_tokens
        ratios = (pairs + SMOOTHING * share) / ((self._counts[a] + SMOOTHING) * share)
        return np.where(known, ratios, 1.0)

    def condition(self, table: CandidateTable) -> CandidateTable:
        """The table with what its candidates say about one another; one that has transitions already stays as it is."""
        if table.transitions is not None or not len(self.pair_keys):
            return table
        transitions = []
        for above, below, scores in zip(table.ids, table.ids[1:], table.log_probs[1:], strict=False):
            log_probs = np.asarray(scores, np.float64)
            rest = max(1.0 - np.exp(log_probs).sum(), _LEAST_REST)
            ratios = self.ratios(np.asarray(above, np.int64), np.asarray(below, np.int64))
            weights = np.exp(log_probs) * ratios**STRENGTH
            with np.errstate(divide="ignore"):
                transitions.append(np.log(weights / (weights.sum(axis=1, keepdims=True) + rest)).tolist())
        return CandidateTable(table.ids, table.log_probs, transitions)

    def to_json(self) -> dict[str, Any]:
        """What `read_bigrams` reads."""
        return {
            "tokens": {"ids": self.token_ids.tolist(), "counts": self.token_counts.tolist()},
            "pairs": {
                "first": (self.pair_keys // _IDS).tolist(),
                "second": (self.pair_keys % _IDS).tolist(),
                "counts": self.pair_counts.tolist(),
            },
        }


def read_bigrams(folder: Path, vocab_size: int) -> Bigrams | None:
    """The counts beside a draft; None if there are none. Raises CheckpointError for a file that holds anything else, or
    ids outside the vocabulary or one twice. Takes memory by the file's size, however large the vocabulary is."""
    path = folder / BIGRAMS_FILE
    if not folder.is_dir() or not (path.exists() or path.is_symlink()):
        return None
    raw = read_json(inside(folder, BIGRAMS_FILE), "table of bigrams", max_bytes=_MAX_BYTES)
    ids, counts = _columns(path, raw, "tokens", ("ids", "counts"))
    first, second, pair_counts = _columns(path, raw, "pairs", ("first", "second", "counts"))
    highest = max(int(column.max(initial=-1)) for column in (ids, first, second))
    if highest >= vocab_size:
        raise CheckpointError(
            f"{path} counts the token {highest}, outside the vocabulary (ids 0 to {vocab_size - 1}); count again with "
            "`dflash bigrams`, or remove the file."
        )
    if len(np.unique(ids)) < len(ids):
        raise CheckpointError(f"{path} counts a token twice; count again with `dflash bigrams`, or remove the file.")
    if len(first) and not counts.sum():
        raise CheckpointError(
            f"{path} counts pairs and no tokens; count again with `dflash bigrams`, or remove the file."
        )
    keys = first * _IDS + second
    order = np.argsort(keys, kind="stable")
    return Bigrams(ids, counts, keys[order], pair_counts[order])


def _columns(path: Path, raw: dict[str, Any], table: str, names: Sequence[str]) -> list[NDArray[np.int64]]:
    """Columns of whole numbers from 0 to 2^31 - 1, all of one length."""
    found = raw.get(table)
    columns = []
    for name in names:
        values = found.get(name) if isinstance(found, dict) else None
        whole = isinstance(values, list) and all(type(value) is int and 0 <= value < _IDS for value in values)
        if not whole or len(values) != len(found[names[0]]):  # type: ignore[arg-type, index]
            raise CheckpointError(
                f"{path}: '{table}' must hold the equally long lists of whole numbers {', '.join(names)}; count again "
                "with `dflash bigrams`, or remove the file."
            )
        columns.append(np.asarray(values, np.int64))
    return columns
