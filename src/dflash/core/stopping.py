"""When a generation ends by itself: stop tokens (all of them, the very first token included) and stop strings.

Limits of length are the loop's business. A rule looks only at tokens that the target has accepted, never at
draft tokens or at ids that mean something special to the drafter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dflash.core.text import Decode, IncrementalText
from dflash.types import SamplingParams


class StopRule:
    """The stop conditions of one request; remembers the text so far if there are stop strings."""

    def __init__(self, stop_ids: Iterable[int] = (), text: IncrementalText | None = None) -> None:
        """`stop_ids`: tokens that end the generation. `text`: watches the stop strings it was built with;
        it must belong to this rule alone, as the rule pushes every token."""
        self._stop_ids = frozenset(stop_ids)
        self._text = text

    @classmethod
    def for_request(cls, params: SamplingParams, eos_ids: Iterable[int], decode: Decode) -> StopRule:
        """The rule of `params` for a target whose generation config names `eos_ids`."""
        own = () if params.ignore_eos else eos_ids
        text = IncrementalText(decode, params.stop) if params.stop else None
        return cls({*own, *params.stop_token_ids}, text)

    def first_stop(self, tokens: Sequence[int]) -> int | None:
        """How many of this round's tokens stay, the stopping one included; None if none of them stops.

        Call it once per round, with the round's tokens in order: stop strings may span rounds.
        """
        for index, token in enumerate(tokens):
            if token in self._stop_ids:
                return index + 1
            if self._text is not None:
                self._text.push((token,))
                if self._text.stopped:
                    return index + 1
        return None
