"""Are outputs the same? A speculative form and the plain one that it promises to repeat; one repeat and another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dflash.bench.record import DifferencePart, IdentityPart, RequestPart

Done = Sequence[tuple[int, RequestPart]]
"""(repeat, answered request)."""


def compare_outputs(ours: Done, reference: Done, name: str) -> IdentityPart:
    """Compare every answer with the reference's answer to the same question in the same repeat."""
    theirs = {(repeat, *request.key): request for repeat, request in reference}
    num_compared = 0
    differences = []
    for repeat, request in ours:
        other = theirs.get((repeat, *request.key))
        if other is None:
            continue
        num_compared += 1
        found = first_difference(request, other)
        if found is not None:
            unit, position = found
            differences.append(
                DifferencePart(
                    prompt_id=request.prompt_id, turn=request.turn, repeat=repeat, unit=unit, position=position
                )
            )
    return IdentityPart(
        reference=name, num_compared=num_compared, num_same=num_compared - len(differences), differences=differences
    )


def first_difference(ours: RequestPart, theirs: RequestPart) -> tuple[Literal["token", "character"], int] | None:
    """Where two outputs part, by token ids where both have them, else by text; None if they are the same."""
    if ours.token_ids is not None and theirs.token_ids is not None:
        position = _parting(ours.token_ids, theirs.token_ids)
        return None if position is None else ("token", position)
    position = _parting(ours.text, theirs.text)
    return None if position is None else ("character", position)


def num_unsteady(done: Done) -> int | None:
    """Questions that were answered differently in different repeats; None if nothing was asked twice."""
    answers: dict[tuple[str, int], list[RequestPart]] = {}
    for _, request in done:
        answers.setdefault(request.key, []).append(request)
    asked_twice = [several for several in answers.values() if len(several) > 1]
    if not asked_twice:
        return None
    return sum(any(first_difference(first, other) is not None for other in others) for first, *others in asked_twice)


def _parting(ours: Sequence[object], theirs: Sequence[object]) -> int | None:
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
