"""Do the rows of a tree see their own branch and nothing else, and is the kept path all that stays? Path by path.

Texts hardly show it: what is accepted is mostly the likeliest chain, which lies in a tree as it would alone. So a tree
of random tokens is fed, every path to a leaf is compared with the bare model's answer to that text, and one more
forward after keeping it as well. For targets whose layer states can all hold branches. Framework-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash.audit.oracle import Oracle
from dflash.audit.states import STEP, Recorder, random_text
from dflash.types import Proposal

PARENTS = (0, 0, 1, 1, 2, 2, 4, 4)
"""Of rows 1 to 8: two branches, each splitting again, one of them twice."""
PATHS = ((0, 1, 3), (0, 2, 5), (0, 2, 6), (0, 1, 4, 7), (0, 1, 4, 8))
"""To every leaf."""


@dataclass(frozen=True)
class TreeAudit:
    """One tree behind one prompt."""

    num_paths: int
    num_rows: int
    """Rows compared."""
    error: float
    """Largest difference of a logit from the bare model's."""
    tolerance: float
    """Difference that rounding explains."""
    path: tuple[int, ...] | None
    """The path with the largest difference, if that is a fault."""

    @property
    def passed(self) -> bool:
        """Whether rounding explains what was seen."""
        return self.error <= self.tolerance


def audit_trees(recorder: Recorder, oracle: Oracle, *, prompt_length: int) -> TreeAudit:
    """Feed the tree behind `prompt_length` tokens, once per path."""
    text = random_text(prompt_length + 1 + len(PARENTS) + STEP, recorder.vocab_size, seed=6)
    prompt, anchor = text[:prompt_length], text[prompt_length]
    tokens, behind = text[prompt_length + 1 : -STEP], text[-STEP:]
    tree = Proposal.tree(tokens, PARENTS)
    error, num_rows = 0.0, 0
    worst: tuple[int, ...] = ()
    for path in PATHS:
        ids = [*prompt, anchor, *tree.along(path), *behind]
        rows = _rows_of_path(recorder, prompt, anchor, tree, path, behind)
        found = float(np.abs(rows - oracle.logits(ids, len(rows))).max())
        num_rows += len(rows)
        if found > error:
            error, worst = found, path
    tolerance = oracle.tolerance(ids, len(rows))
    return TreeAudit(len(PATHS), num_rows, error, tolerance, worst if error > tolerance else None)


def _rows_of_path(
    recorder: Recorder,
    prompt: Sequence[int],
    anchor: int,
    tree: Proposal,
    path: Sequence[int],
    behind: Sequence[int],
) -> np.ndarray:
    """Logits [len(path) + STEP, V] of the path's rows in the tree, and of the tokens fed after keeping it."""
    session = recorder.session()
    try:
        session.prefill(prompt)
        inside = recorder.logits(session.verify(anchor, tree).logits)[list(path)]
        session.commit(path)
        after = recorder.logits(session.verify(behind[0], Proposal(tuple(behind[1:]))).logits)
    finally:
        session.close()
    return np.concatenate([inside, after])
