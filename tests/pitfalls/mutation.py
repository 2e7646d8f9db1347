"""A fault of the table as a change of the sources that brings it back.

`scripts/prove_pitfalls.py` applies those of `mutations_a.py` and `mutations_b.py` one at a time to a copy of the
sources and shows that the named tests fail. `test_table.py` checks in every run of the tests that each row has one and
that it still fits the sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """One fault, put in."""

    row: str
    """Of the table."""
    what: str
    """What goes wrong, in words."""
    file: str
    """From src/dflash on."""
    old: str
    """Text that occurs exactly once in the file ..."""
    new: str
    """... and what it becomes."""
    tests: tuple[str, ...]
    """Tests of the row, each of which must fail; "[...]" picks one of a test's cases."""

    def apply(self, source: Path) -> None:
        """Change the sources below `source` (a folder that holds `dflash`)."""
        path = source / "dflash" / self.file
        text = path.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.row}: {self.file} holds {self.old!r} {text.count(self.old)} times"
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
