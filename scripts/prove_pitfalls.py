"""Breaks the package once per known fault and shows that the tests of tests/pitfalls/table.py notice.

    python scripts/prove_pitfalls.py            every fault: some minutes on one core
    python scripts/prove_pitfalls.py A9 B5      these rows only

First the named tests run on an unchanged copy of the sources, where all must pass. Then each mutation of
tests/pitfalls/mutations_a.py and mutations_b.py is applied to a copy of its own, and every test that it names must fail
there, by what it asserts: a test that fails because the mutation is no working program proves nothing. The working tree
is not touched. Ends with exit code 1 if a fault is not caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the table lives in the tests

from tests.pitfalls import mutations_a, mutations_b  # noqa: E402
from tests.pitfalls.mutation import Mutation  # noqa: E402

MUTATIONS = mutations_a.MUTATIONS + mutations_b.MUTATIONS

BROKEN_PROGRAM = ("NameError", "SyntaxError", "ImportError", "ModuleNotFoundError", "UnboundLocalError")
"""What a mutation fails with that was written wrongly."""
LIMIT_SECONDS = 900


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove the rows named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description="Show that every known fault is caught by its tests.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows of the table, e.g. A9 (default: all)")
    parser.add_argument("--no-control", action="store_true", help="leave out the run on unchanged sources")
    options = parser.parse_args(arguments)
    chosen = [mutation for mutation in MUTATIONS if not options.rows or mutation.row in options.rows]
    if unknown := set(options.rows) - {mutation.row for mutation in MUTATIONS}:
        parser.error(f"no mutation for {', '.join(sorted(unknown))}")
    if not options.no_control and not control(chosen):
        return 1
    missed = [mutation for mutation in chosen if not proven(mutation)]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults caught, {len({one.row for one in chosen})} rows")
    return 1 if missed else 0


def control(chosen: Sequence[Mutation]) -> bool:
    """Whether the tests pass as things are."""
    tests = sorted({test for mutation in chosen for test in mutation.tests})
    with copied() as source:
        found = outcomes(source, tests)
    failed = [test for test in tests if found.get(function_of(test)) != ""]
    for test in failed:
        print(f"control: {test} does not pass on unchanged sources: {found.get(function_of(test), 'it did not run')}")
    return not failed


def proven(mutation: Mutation) -> bool:
    """Whether every test of a mutation fails under it; says what happened."""
    with copied() as source:
        mutation.apply(source)
        found = outcomes(source, mutation.tests)
    verdicts = {test: found.get(function_of(test), "it did not run") for test in mutation.tests}
    caught = True
    for test, message in verdicts.items():
        noticed = bool(message) and message != "it did not run" and not message.startswith(BROKEN_PROGRAM)
        caught = caught and noticed
        word = "caught" if noticed else "NOT CAUGHT"
        print(f"{mutation.row:4} {word}: {mutation.what}\n     {test}: {message or 'it passes'}", flush=True)
    return caught


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the sources that may be broken; weights and other data are linked."""
    with tempfile.TemporaryDirectory(prefix="dflash-pitfalls-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "data"))
        (source / "dflash" / "data").symlink_to(ROOT / "src" / "dflash" / "data")
        yield source


def outcomes(source: Path, tests: Sequence[str]) -> dict[str, str]:
    """Test function ("file::function") -> "" if all its cases passed, else the first line of the first failure."""
    report = source.parent / "report.xml"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(source), str(ROOT))), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "pythonpath="]
    command += ["-o", "junit_family=xunit1", "--junitxml", str(report), *(f"tests/{test}" for test in tests)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    if not report.exists():
        raise SystemExit(f"pytest did not report:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        function = f"{case.get('file', '').removeprefix('tests/')}::{case.get('name', '').partition('[')[0]}"
        failure = next(iter([*case.findall("failure"), *case.findall("error")]), None)
        message = "" if failure is None else (failure.get("message") or "failed").splitlines()[0][:160]
        found[function] = found.get(function) or message
    return found


def function_of(test: str) -> str:
    """A node id without the case's name."""
    return test.partition("[")[0]


if __name__ == "__main__":
    raise SystemExit(main())
