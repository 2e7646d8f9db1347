"""The built-in set: prompts written for this project, so that the benchmark works with no network and no files.

Eight kinds of five: chat, code, maths, questions about a given text, summaries, rewriting, other languages, and free
writing. They were written for measuring, not taken from anywhere; no draft that ships here was trained on them.
"""

from __future__ import annotations

import importlib.resources

from dflash.bench.datasets.base import BUILT_IN, Questions
from dflash.prepare.prompts import read_prompts

FILE = ("data", "prompts", "bench.jsonl")
LICENCE = "Apache-2.0"


def built_in_questions() -> Questions:
    """All of them; `source` of a conversation is its kind."""
    with importlib.resources.as_file(importlib.resources.files("dflash").joinpath(*FILE)) as file:
        rows = tuple(read_prompts(file))
    return Questions(name=BUILT_IN, conversations=rows, origin="this package", licence=LICENCE, num_available=len(rows))
