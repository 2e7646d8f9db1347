"""Incremental text: never half a character, never part of a stop string, never taken back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.core.text import Decode, IncrementalText, find_stop, held_length

SPECIAL = 256
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def byte_level(ids: Sequence[int]) -> str:
    """Like a byte-level BPE tokenizer; id 256 is a skipped special token."""
    return bytes(token for token in ids if token != SPECIAL).decode("utf-8", errors="replace")


def byte_fallback(ids: Sequence[int]) -> str:
    """Like SentencePiece with byte fallback: a run of bytes >= 0x80 that is no valid text becomes U+FFFD per
    byte, earlier complete characters of the run included, and the first space is dropped."""
    text, run = "", b""
    for token in (*ids, SPECIAL):
        if 0x80 <= token < SPECIAL:
            run += bytes([token])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += REPLACEMENT * len(run)
        run = b""
        text += chr(token) if token < 0x80 else ""
    return text.removeprefix(" ")


def pieces_of(ids: Sequence[int], cuts: Sequence[int], decode: Decode, stop: Sequence[str] = ()) -> list[str]:
    """The pieces for tokens that arrive in chunks of the given sizes."""
    text = IncrementalText(decode, stop)
    pieces, rest = [], list(ids)
    for size in (*cuts, len(rest)):
        pieces.append(text.push(rest[:size]))
        rest = rest[size:]
    return [*pieces, text.finish()]


ANY_TEXT = st.text(alphabet=st.sampled_from("ab .\né€😀 \n界"), max_size=60)
CUTS = st.lists(st.integers(0, 6), max_size=20)


@settings(derandomize=True, deadline=None)
@given(ANY_TEXT, CUTS, st.sampled_from([byte_level, byte_fallback]))
def test_pieces_add_up_to_the_text(text: str, cuts: list[int], decode: Decode) -> None:
    """Guards against lost or doubled characters at piece and window borders, and against half characters."""
    ids = list(text.encode())
    pieces = pieces_of(ids, cuts, decode)
    assert "".join(pieces) == decode(ids)
    assert REPLACEMENT not in "".join(pieces)


@settings(derandomize=True, deadline=None)
@given(ANY_TEXT, CUTS, st.lists(st.sampled_from(["a", "ab", "ba b", "\n\n", "é€", "😀", ". a", "b."]), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, cuts: list[int], stop: list[str]) -> None:
    """Guards against a shown stop string or a shown beginning of one, however the tokens arrive."""
    ids = list(text.encode())
    ends = [text[:length] for length in range(len(text) + 1) if find_stop(text[:length], stop) is not None]
    expected = ends[0][: find_stop(ends[0], stop)] if ends else text
    shown = ""
    for piece in pieces_of(ids, cuts, byte_level, stop):
        shown += piece
        assert expected.startswith(shown)
    assert shown == expected


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, SPECIAL), max_size=80), CUTS, st.sampled_from([byte_level, byte_fallback]))
def test_any_bytes_give_the_same_text_in_any_chunks(ids: list[int], cuts: list[int], decode: Decode) -> None:
    """Guards against text that differs between plain and speculative decoding for broken UTF-8."""
    assert "".join(pieces_of(ids, cuts, decode)) == "".join(pieces_of(ids, [1] * len(ids), decode))


def test_multi_byte_characters_split_over_rounds() -> None:
    """Guards against U+FFFD in a stream: each character appears with its last byte."""
    ids = list("é😀!".encode())
    text = IncrementalText(byte_level)
    assert [text.push([token]) for token in ids] == ["", "é", "", "", "", "😀", "!"]
    assert text.finish() == ""


def test_an_incomplete_character_at_the_end_is_shown_as_such() -> None:
    """Guards against text that disagrees with a plain decode of all ids when the limit cuts a character."""
    text = IncrementalText(byte_level)
    assert text.push(list("é".encode())[:1]) == ""
    assert text.finish() == REPLACEMENT
    assert text.finish() == ""


def test_a_genuine_replacement_character_is_only_delayed() -> None:
    ids = [*f"a{REPLACEMENT}b".encode()]
    assert "".join(pieces_of(ids, [1] * len(ids), byte_level)) == f"a{REPLACEMENT}b"


def test_possible_stop_prefix_is_held_and_released() -> None:
    """Guards against showing "\\nUser" before it is known whether "\\nUser:" follows."""
    text = IncrementalText(byte_level, ["\nUser:"])
    assert text.push(b"hi\nUse") == "hi"
    assert text.push(b"ful") == "\nUseful"
    assert text.push(b"\n\nUser") == "\n"
    assert text.push(b": more") == ""
    assert text.stopped
    assert text.finish() == text.push(b"x") == ""


def test_held_prefix_is_shown_at_the_end() -> None:
    text = IncrementalText(byte_level, ["END"])
    assert text.push(b"the EN") == "the "
    assert text.finish() == "EN"


@pytest.mark.parametrize("decoder", [byte_level, byte_fallback])
def test_the_window_stays_small(decoder: Decode) -> None:
    """Guards against quadratic decoding (no call may see more than a few dozen tokens, special runs included) and
    against a window that begins inside a character."""
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decoder(ids)

    for shift in range(9):  # the window slides at another place of the nine bytes each time
        ids = [*("x" * shift + "wörd 😀 " * 20 + "😀é界" * 20).encode(), *[SPECIAL] * 100, *b"end"]
        text = IncrementalText(decode)
        assert text.push(ids) + text.finish() == decoder(ids)
    assert longest <= 40


@pytest.mark.parametrize(
    ("text", "stop", "length"),
    [("abc", ["cd"], 1), ("abc", ["bcd", "c"], 2), ("abc", ["abc"], 0), ("", ["x"], 0), ("abab", ["ababc"], 4)],
)
def test_held_length(text: str, stop: list[str], length: int) -> None:
    assert held_length(text, stop) == length
