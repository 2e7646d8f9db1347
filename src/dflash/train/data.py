"""Training sequences: answers in memory, split off the held-out ones, order and batches by (seed, epoch).

The order of an epoch is a pure function of (seed, epoch), so the data position of a checkpoint is two integers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash.errors import DataError
from dflash.prepare.answers import AnswerRow, read_answers

_SPLIT_STREAM, _ORDER_STREAM, _ANCHOR_STREAM = 1, 2, 3
_LATER_TURN = re.compile(r"(?P<conversation>.*)#turn\d+")


@dataclass(frozen=True)
class AnswerSequence:
    """One prompt with its answer."""

    token_ids: NDArray[np.int64]
    """[S] prompt then answer, cut to the maximum length."""
    num_prompt: int
    loss_mask: NDArray[np.bool_]
    """[S] True on answer tokens that are learnt from."""


@dataclass(frozen=True)
class Dataset:
    """Sequences to learn from and sequences kept apart."""

    train: list[AnswerSequence]
    held_out: list[AnswerSequence]

    def fingerprint(self) -> str:
        """Of all sequences in their order: a run may only be resumed on the data it was started with."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            digest.update(f"{len(part)};".encode())
            for sequence in part:
                digest.update(f"{len(sequence.token_ids)},{sequence.num_prompt};".encode())
                digest.update(sequence.token_ids.astype("<i4").tobytes())
                digest.update(np.packbits(sequence.loss_mask).tobytes())
        return digest.hexdigest()[:16]


def load_dataset(
    paths: Sequence[Path],
    *,
    max_length: int,
    held_out: int,
    limit: int | None,
    seed: int,
    vocab_size: int | None = None,
) -> Dataset:
    """Read answers, shuffle by seed, keep `held_out` apart and at most `limit` of the rest.

    The turns of one conversation (ids "x", "x#turn2", ...) contain one another, so they are held out together: a few
    sequences more than asked for, and none of them is learnt from.

    Raises DataError if nothing can be learnt from, or for token ids at or above `vocab_size`.
    """
    sequences: list[AnswerSequence] = []
    names: list[tuple[int, str]] = []
    for source, path in enumerate(paths):
        for row in read_answers(path, vocab_size=vocab_size):
            sequence = _sequence(row, max_length)
            if (sequence.loss_mask[:-1] & sequence.loss_mask[1:]).any():
                sequences.append(sequence)
                names.append((source, row.id))
    order = [int(i) for i in np.random.default_rng([seed, _SPLIT_STREAM]).permutation(len(sequences))]
    groups = _conversations(names)
    kept_apart = {groups[i] for i in order[:held_out]}
    apart = [i for i in order if groups[i] in kept_apart]
    rest = [i for i in order if groups[i] not in kept_apart][:limit]
    if not rest:
        raise DataError(
            f"only {len(sequences)} usable answers in {', '.join(map(str, paths))}, but {held_out} are to be held out "
            "(with all turns of their conversations); prepare more answers or lower data.held_out."
        )
    return Dataset(train=[sequences[i] for i in rest], held_out=[sequences[i] for i in apart])


def epoch_order(num_sequences: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which an epoch visits the sequences."""
    return np.random.default_rng([seed, _ORDER_STREAM, epoch]).permutation(num_sequences)


def visits(num_sequences: int, *, seed: int, start: int) -> Iterator[tuple[int, np.random.Generator]]:
    """Endless (sequence number, generator for its anchors), from visit number `start` on."""
    visit = start
    while True:
        epoch, offset = divmod(visit, num_sequences)
        order = epoch_order(num_sequences, seed=seed, epoch=epoch)
        for number in order[offset:]:
            yield int(number), np.random.default_rng([seed, _ANCHOR_STREAM, visit])
            visit += 1


def _sequence(row: AnswerRow, max_length: int) -> AnswerSequence:
    prompt = list(row.prompt_ids)
    answer_mask = list(row.loss_mask) if row.loss_mask is not None else [True] * len(row.answer_ids)
    ids = np.asarray([*prompt, *row.answer_ids], dtype=np.int64)[:max_length]
    mask = np.asarray([False] * len(prompt) + [bool(m) for m in answer_mask], dtype=np.bool_)[:max_length]
    return AnswerSequence(ids, len(prompt), mask)


def _conversations(names: Sequence[tuple[int, str]]) -> list[Hashable]:
    """A key per row, equal for the turns of one conversation only. Rows without a later turn stay apart even if their
    ids are equal: files without ids all begin with "line-1"."""
    later = [_LATER_TURN.fullmatch(name) for _, name in names]
    of_turns = {(source, match["conversation"]) for (source, _), match in zip(names, later, strict=True) if match}
    keys: list[Hashable] = []
    for number, ((source, name), match) in enumerate(zip(names, later, strict=True)):
        base = (source, match["conversation"] if match else name)
        keys.append(base if base in of_turns else number)
    return keys
