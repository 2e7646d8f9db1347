"""Tokens to text, piece by piece: knows what may be shown already and what might still change.

Held back are (1) a tail of U+FFFD, as the rest of a multi-byte character may come with the next token, and
(2) a tail that could become a stop string. Text once released is never taken back, and the pieces do not
depend on how many tokens arrive at a time: tokens are processed one by one, so that plain and speculative
decoding show the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, with U+FFFD for incomplete characters and special tokens skipped; must not "clean up"
spaces, since that would change text that has been shown."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 6
"""Most tokens kept as left context when the window slides."""
_CHARACTER_TOKENS = 4
"""Most tokens of one character (UTF-8 bytes)."""
_WINDOW_TOKENS = 24


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Index in `text` where the first stop string begins, None if there is none."""
    found = [index for index in map(text.find, stop) if index >= 0]
    return min(found, default=None)


def held_length(text: str, stop: Sequence[str]) -> int:
    """Length of the longest tail of `text` that is the beginning of a stop string."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(string.startswith(text[-length:]) for string in stop):
            return length
    return 0


class IncrementalText:
    """The text of one generation, as far as it is certain.

    Decoding needs left context (SentencePiece drops the first space, byte tokens combine), but decoding
    everything again for each token would cost quadratic time: a sliding window of tokens is decoded.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._window: list[int] = []
        self._decoded = ""  # the certain text of the window that has gone on to _pending
        self._pending = ""  # certain text that may be the beginning of a stop string
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared; nothing is shown any more."""
        return self._stopped

    def push(self, tokens: Sequence[int]) -> str:
        """Append tokens; returns the text that became certain (often empty, never retracted)."""
        return "".join([self._push_one(token) for token in tokens])

    def finish(self) -> str:
        """The generation has ended: returns what was held back, unless a stop string ended the text."""
        rest = "" if self._stopped else self._decode(self._window)[len(self._decoded) :]
        shown = self._release(rest, hold=False)
        self._stopped = True
        return shown

    def _push_one(self, token: int) -> str:
        if self._stopped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        certain = text.rstrip(_REPLACEMENT)
        # By length, not by prefix: byte-fallback decoders turn a whole run of bytes into U+FFFD while its
        # last character is incomplete, which makes `certain` shorter for a moment.
        news = certain[len(self._decoded) :]
        if news:
            self._decoded = certain
        elif text == self._decoded and text:
            self._window.pop()  # a special token: it adds nothing, and a run of them must not fill the window
        if text == certain and len(self._window) >= _WINDOW_TOKENS:
            self._slide(text)
        return self._release(news, hold=True)

    def _slide(self, text: str) -> None:
        """Drop old tokens if the rest decodes to the end of the same text (no character is cut)."""
        for length in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS - _CHARACTER_TOKENS, -1):
            tail = self._window[-length:]
            decoded = self._decode(tail)
            if decoded and text.endswith(decoded):
                self._window, self._decoded = tail, decoded
                return

    def _release(self, news: str, *, hold: bool) -> str:
        if not self._stop:
            return news
        text = self._pending + news
        end = find_stop(text, self._stop) if news else None
        if end is not None:
            self._stopped, self._pending = True, ""
            return text[:end]
        keep = held_length(text, self._stop) if hold else 0
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]
