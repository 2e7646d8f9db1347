"""Counts of neighbouring tokens in answers, written beside a draft: what `core/bigrams.py` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash.core.bigrams import BIGRAMS_FILE, Bigrams
from dflash.core.draft_reader import read_draft
from dflash.errors import UnsupportedModel
from dflash.prepare.jsonl import write_atomically
from dflash.train.data import SPLIT, AnswerSequence, load_dataset


@dataclass(frozen=True)
class Counted:
    """What was written."""

    file: Path
    num_answers: int
    num_tokens: int
    num_pairs: int


def write_bigrams(folder: Path, sequences: Sequence[AnswerSequence], split_seed: int) -> Counted:
    """Count the neighbours of what may be learnt from these sequences and write the file of the draft in `folder`,
    whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    bigrams = Bigrams.count((sequence.token_ids, sequence.loss_mask) for sequence in sequences)
    origin = {"answers": len(sequences), "split": SPLIT, "split_seed": split_seed}
    text = json.dumps({"data": origin} | bigrams.to_json(), separators=(",", ":"))  # megabytes, if indented
    write_atomically(folder / BIGRAMS_FILE, text.encode())
    return Counted(folder / BIGRAMS_FILE, len(sequences), bigrams.num_tokens, len(bigrams.pair_keys))


def count_bigrams(answers: Sequence[Path], draft: Path, *, split_seed: int = 0, limit: int | None = None) -> Counted:
    """Give the draft in a local folder the counts of answers of its target.

    Prompts that a run with this `split_seed` would never learn from are left out, so that what it holds out stays
    unseen.

    Raises:
        CheckpointError: the folder holds no draft.
        UnsupportedModel: it holds one with transitions of its own, where counts have no effect.
        DataError: answers that cannot be read, or with ids outside the draft's vocabulary.
    """
    config = read_draft(draft).config
    if config.has_transitions:
        raise UnsupportedModel(
            f"{draft} is a draft of kind {config.kind} that says itself which tokens follow one another; counts would "
            "change nothing, so use it without."
        )
    data = load_dataset(
        answers, max_length=1 << 20, held_out=0, limit=limit, seed=split_seed, vocab_size=config.vocab_size
    )
    return write_bigrams(draft, data.train, split_seed)
