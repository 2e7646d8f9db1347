"""Traces of real answers: what a draft guesses behind every token of them, to replay decisions without any model.

With guesses that are point masses and draws that are keyed by position, a text does not depend on how it is decoded. So
it is decoded once, then fed again, and behind each of its tokens the draft is asked what it would propose there. That
is all that any rule of deciding ever sees of draft and target, and `bench/replay.py` can run it on a clock of its own.
Knows engines by the parts they are made of, and files; decides nothing.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.core.adaptive import as_asker
from dflash.core.drafting import CopyDrafter
from dflash.core.engine import Engine
from dflash.core.processing import has_penalties
from dflash.core.reference import distribution
from dflash.errors import ConfigError, DataError
from dflash.types import CandidateTable, Drafting, Proposal, SamplingParams

NUM_CANDIDATES = 8
"""Candidates per slot that are kept."""
NUM_CHANCES = 64
"""Most probable tokens per position whose probabilities are kept; of the others it is taken to be 0."""
DIGITS = 5
"""Decimals of log-probabilities and probabilities."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One answer."""

    name: str
    """Of the set and the prompt, "set/id"."""
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    """The first one is the prefill's; a stop token is included."""
    stopped: bool
    """Whether the answer ended by itself, not at the limit."""
    temperature: float
    tables: tuple[CandidateTable, ...]
    """[a]: what the draft proposes with answer token a as the anchor, behind the features of all tokens before it;
    there is none for the last token."""
    chances: tuple[dict[int, float], ...]
    """[a]: the target's probabilities, processed, of what may stand at a; of the first token, and where nothing is
    drawn, empty."""


def record(
    engine: Engine,
    name: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    answer: Sequence[int] | None = None,
) -> Trace:
    """Ask the draft behind each token of an answer.

    Args:
        answer: a text that this target gave to the prompt by `params` before; None = it is decoded now.

    Raises ConfigError without a draft, and for stop strings, bias or penalties, which a replay does not know.
    """
    if engine.drafter is None or isinstance(engine.drafter, CopyDrafter):
        raise ConfigError("there is no draft to record; load one.")
    if params.stop or params.logit_bias or has_penalties(params):
        raise ConfigError("answers are recorded without stop strings, logit bias and penalties; leave them out.")
    stopped = answer is not None and len(answer) < params.max_new_tokens
    if answer is None:
        result = engine.generate(prompt_ids=prompt_ids, params=params, drafting=Drafting(mode="exact"))
        answer, stopped = result.token_ids, result.stats.finish_reason == "stop"
    draft = engine.drafter.session()
    ask = as_asker(draft)
    tables: list[CandidateTable] = []
    chances: list[dict[int, float]] = [{}]
    session = engine.target.session(exact=engine.info.exact, features=True)
    try:
        draft.observe(prompt_ids, session.prefill(prompt_ids).features)
        for begin in range(0, len(answer) - 1, engine.max_rows):
            part = answer[begin : min(begin + engine.max_rows, len(answer) - 1)]
            verdict = session.verify(part[0], Proposal(tuple(part[1:])))
            if params.temperature > 0:
                chances += [_chances(row, params) for row in engine.as_numpy(verdict.logits)]
            for row, anchor in enumerate(part):
                tables.append(ask(anchor, draft.max_proposal, NUM_CANDIDATES))
                draft.observe([anchor], None if verdict.features is None else verdict.features[row : row + 1])
            session.commit(range(len(part)))
    finally:
        session.close()
    return Trace(
        name=name,
        prompt_ids=tuple(prompt_ids),
        answer_ids=tuple(answer),
        stopped=stopped,
        temperature=params.temperature,
        tables=tuple(tables),
        chances=tuple(chances) if params.temperature > 0 else ({},) * len(answer),
    )


def _chances(logits: NDArray[np.float32], params: SamplingParams) -> dict[int, float]:
    """The most probable tokens of a row [V] with their probabilities, processed."""
    probs = distribution(logits, params)
    likeliest = np.argsort(-probs, kind="stable")[:NUM_CHANCES]
    return {int(token): round(float(probs[token]), DIGITS) for token in likeliest if probs[token] > 0}


def write_traces(path: Path, traces: Iterable[Trace]) -> int:
    """One compressed JSON line per answer, written as they come; how many there were."""
    count = 0
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for trace in traces:
            row = vars(trace) | {
                "tables": [
                    {"ids": table.ids, "log_probs": _rounded(table.log_probs)}
                    | ({} if table.transitions is None else {"transitions": _rounded(table.transitions)})
                    for table in trace.tables
                ],
                "chances": [list(map(list, chances.items())) for chances in trace.chances],
            }
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            count += 1
    return count


def read_traces(path: Path) -> Iterator[Trace]:
    """The inverse of `write_traces`. Raises DataError for a file that holds anything else."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield _parse(json.loads(line))
    except (OSError, EOFError, ValueError, RecursionError, KeyError, TypeError, zlib.error) as error:
        raise DataError(f"{path} holds no traces ({error}); record them with scripts/replay_rounds.py.") from error


def _parse(raw: dict[str, Any]) -> Trace:
    tables = [CandidateTable(one["ids"], one["log_probs"], one.get("transitions")) for one in raw["tables"]]
    return Trace(
        name=raw["name"],
        prompt_ids=tuple(raw["prompt_ids"]),
        answer_ids=tuple(raw["answer_ids"]),
        stopped=raw["stopped"],
        temperature=raw["temperature"],
        tables=tuple(tables),
        chances=tuple({int(token): float(share) for token, share in chances} for chances in raw["chances"]),
    )


def _rounded(values: Any) -> Any:
    """Nested lists of numbers with `DIGITS` decimals."""
    return round(float(values), DIGITS) if not isinstance(values, (list, tuple)) else list(map(_rounded, values))
