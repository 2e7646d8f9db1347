"""Training sequences: answers in memory, split off the held-out ones, order and batches by (seed, epoch).

Which prompts are held out is a function of the prompt and the split's seed alone, not of the file, its order or the
limit: a draft that goes on from another (`init`) with more or other answers is not evaluated on what that one learnt.
The order of an epoch is a pure function of (seed, epoch), so the data position of a checkpoint is two integers.
"""

from __future__ import annotations

import hashlib
import logging
import re
from array import array
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash.errors import DataError
from dflash.prepare.answers import AnswerRow, read_answers

logger = logging.getLogger(__name__)

SPLIT = "prompt-hash-1"
"""Name of the rule by which prompts are held out, kept beside runs and drafts; a change of the rule is a new name."""
RESERVED_SHARE = 1 / 32
"""Share of all prompts, by hash, that is never learnt from, whatever answers are given and however few are held out."""

_ORDER_STREAM, _ANCHOR_STREAM, _GROUP_STREAM = 2, 3, 4  # 1 was the split's, when it was a permutation
_HASH_BYTES = 8
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
    """Read answers, order them by a hash of (seed, prompt), keep `held_out` apart and at most `limit` of the rest.

    The held-out ones are the first. Prompts whose hash lies in the lowest RESERVED_SHARE are not learnt from even where
    fewer are held out, so that other answers never move a held-out prompt into the training part. Only where there are
    less than `held_out` such prompts, the next ones are held out as well: a fair split, but not beside other answers.

    Equal prompts, and the turns of one conversation (ids "x", "x#turn2", ...), which contain one another, are on one
    side: a few sequences more than asked for are held out.

    Raises DataError if nothing can be learnt from, or for token ids at or above `vocab_size`.
    """
    sequences: list[AnswerSequence] = []
    prompts: list[array[int]] = []
    names: list[tuple[int, str]] = []
    for source, path in enumerate(paths):
        for row in read_answers(path, vocab_size=vocab_size):
            sequence = _sequence(row, max_length)
            if (sequence.loss_mask[:-1] & sequence.loss_mask[1:]).any():
                sequences.append(sequence)
                prompts.append(row.prompt_ids)
                names.append((source, row.id))
    keys = _split_keys(prompts, _conversations(names), seed)
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    kept_apart = {keys[i] for i in order[:held_out]}
    reserved = int(RESERVED_SHARE * 256**_HASH_BYTES)
    rest = [i for i in order if keys[i] >= reserved and keys[i] not in kept_apart][:limit]
    if not rest:
        raise DataError(
            f"only {len(sequences)} usable answers in {', '.join(map(str, paths))}, but {held_out} are to be held out "
            "(with all turns of their conversations); prepare more answers or lower data.held_out."
        )
    apart = [i for i in order if keys[i] in kept_apart]
    if (borrowed := sum(keys[i] >= reserved for i in apart)) and len(apart) < len(sequences):
        logger.info(
            "%d of %d held-out sequences lie outside the prompts that no run learns from (1 in %d): "
            "a draft of init may have learnt them from other answers",
            borrowed,
            len(apart),
            round(1 / RESERVED_SHARE),
        )
    return Dataset(train=[sequences[i] for i in rest], held_out=[sequences[i] for i in apart])


def epoch_order(num_sequences: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which an epoch visits the sequences."""
    return np.random.default_rng([seed, _ORDER_STREAM, epoch]).permutation(num_sequences)


def visits(
    num_sequences: int, *, seed: int, start: int, grouping: Grouping | None = None
) -> Iterator[tuple[int, np.random.Generator]]:
    """Endless (sequence number, generator for its anchors), from visit number `start` on."""
    visit = start
    while True:
        epoch, offset = divmod(visit, num_sequences)
        order = epoch_order(num_sequences, seed=seed, epoch=epoch)
        if grouping is not None:
            order = grouped(order, grouping, seed=seed, epoch=epoch)
        for number in order[offset:]:
            yield int(number), np.random.default_rng([seed, _ANCHOR_STREAM, visit])
            visit += 1


@dataclass(frozen=True)
class Grouping:
    """Which visits share a step's forward, so that a wide batch pads little."""

    lengths: NDArray[np.int64]
    """Tokens per sequence."""
    per_step: int
    """Visits of one optimizer step; steps begin at multiples of it."""
    window: int
    """Steps that are drawn together and sorted by length among themselves."""


def grouped(order: NDArray[np.int64], grouping: Grouping, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """`order` of an epoch with sequences of similar length side by side in each step, the steps in random order.

    A permutation of `order`, which stays a pure function of (seed, epoch). The step that an epoch shares with the one
    before it, and an incomplete last one, stay as they were drawn.
    """
    size = grouping.per_step
    lead = -epoch * len(order) % size  # a step that began in the epoch before takes these
    rng = np.random.default_rng([seed, _GROUP_STREAM, epoch])
    parts = [order[:lead]]
    for begin in range(lead, len(order), size * grouping.window):
        drawn = order[begin : begin + size * grouping.window]
        whole = len(drawn) // size * size
        by_length = drawn[np.argsort(grouping.lengths[drawn[:whole]], kind="stable")]
        parts += [rng.permutation(by_length.reshape(-1, size)).ravel(), drawn[whole:]]
    return np.concatenate(parts)


def _sequence(row: AnswerRow, max_length: int) -> AnswerSequence:
    prompt = list(row.prompt_ids)
    answer_mask = list(row.loss_mask) if row.loss_mask is not None else [True] * len(row.answer_ids)
    ids = np.asarray([*prompt, *row.answer_ids], dtype=np.int64)[:max_length]
    mask = np.asarray([False] * len(prompt) + [bool(m) for m in answer_mask], dtype=np.bool_)[:max_length]
    return AnswerSequence(ids, len(prompt), mask)


def _split_keys(prompts: Sequence[array[int]], groups: Sequence[Hashable], seed: int) -> list[int]:
    """A number per row in 0..256^_HASH_BYTES: hash of the seed and the row's prompt, or of the shortest prompt of its
    conversation, that of the first turn."""
    shortest: defaultdict[Hashable, array[int]] = defaultdict(lambda: array("i"))
    for prompt, group in zip(prompts, groups, strict=True):
        if not shortest[group] or len(prompt) < len(shortest[group]):
            shortest[group] = prompt
    keys: dict[Hashable, int] = {}
    for group, prompt in shortest.items():
        content = np.asarray([seed, *prompt], dtype="<i8").tobytes()
        digest = hashlib.blake2b(content, digest_size=_HASH_BYTES, person=b"dflash split").digest()
        keys[group] = int.from_bytes(digest, "little")
    return [keys[group] for group in groups]


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
