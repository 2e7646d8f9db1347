"""Runs the two matrices of docs/architectures.md and writes their tables: target families, and ways to draft by kind of
layer state.

    python scripts/write_architectures.py

Every tiny random model of tests/backends/architectures.py is decoded and compared with the bare Transformers model, as
the tests do; a family or a way that fails would be listed as "no". Takes two to three minutes on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the matrix lives in the tests

from tests.backends.architectures import ARCHITECTURES  # noqa: E402
from tests.backends.matrix import judge, table  # noqa: E402
from tests.backends.modes import STATES, judge_ways, table_of_ways  # noqa: E402

PAGE = ROOT / "docs" / "architectures.md"
BEGIN = "<!-- table: written by scripts/write_architectures.py -->\n"
END = "<!-- end of table -->"
MODES_BEGIN = "<!-- table of modes: written by scripts/write_architectures.py -->\n"
MODES_END = "<!-- end of table of modes -->"


def render(page: str, rows: str, begin: str = BEGIN, end: str = END) -> str:
    """`page` with the table between two marks written anew."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{rows}\n\n{end}{after}"


def main() -> None:
    """Judge every family and write the page."""
    verdicts = {}
    for name in ARCHITECTURES:
        verdicts[name] = judge(name)
        print(f"{name}: {verdicts[name]}", file=sys.stderr)
    page = render(PAGE.read_text(encoding="utf-8"), table(verdicts))
    ways = [judge_ways(family) for family in STATES]
    PAGE.write_text(render(page, table_of_ways(ways), MODES_BEGIN, MODES_END), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
