"""Runs the matrix of target families and writes its table into docs/architectures.md.

    python scripts/write_architectures.py

Every tiny random model of tests/backends/architectures.py is decoded and compared with the bare Transformers model, as
the tests do; a family that fails would be listed as "no". Takes a minute or two on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the matrix lives in the tests

from tests.backends.architectures import ARCHITECTURES  # noqa: E402
from tests.backends.matrix import judge, table  # noqa: E402

PAGE = ROOT / "docs" / "architectures.md"
BEGIN = "<!-- table: written by scripts/write_architectures.py -->\n"
END = "<!-- end of table -->"


def render(page: str, rows: str) -> str:
    """`page` with the table between its two marks written anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{rows}\n\n{END}{after}"


def main() -> None:
    """Judge every family and write the page."""
    verdicts = {}
    for name in ARCHITECTURES:
        verdicts[name] = judge(name)
        print(f"{name}: {verdicts[name]}", file=sys.stderr)
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), table(verdicts)), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
