"""Two texts as HTML with their differences marked, word by word. Everything is escaped."""

from __future__ import annotations

import difflib
import re

from markupsafe import Markup, escape

MAX_CHARACTERS = 1500
"""Longer texts are cut for the page; the record holds them whole."""


def marked(plain: str, other: str) -> Markup:
    """`other` with what it lacks of `plain` struck out and what it adds marked."""
    ours, theirs = (_words(_cut(text)) for text in (plain, other))
    matcher = difflib.SequenceMatcher(a=ours, b=theirs, autojunk=False)
    pieces: list[Markup] = []
    for kind, a_from, a_to, b_from, b_to in matcher.get_opcodes():
        if kind == "equal":
            pieces.append(escape("".join(ours[a_from:a_to])))
            continue
        if a_to > a_from:
            pieces.append(Markup("<del>{}</del>").format("".join(ours[a_from:a_to])))
        if b_to > b_from:
            pieces.append(Markup("<ins>{}</ins>").format("".join(theirs[b_from:b_to])))
    return Markup("").join(pieces)


def _words(text: str) -> list[str]:
    return re.findall(r"\s+|\w+|[^\w\s]", text)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " […]"
