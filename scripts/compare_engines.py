"""One table of this engine, Transformers' own DFlash and the real vLLM, with the same target, draft and prompts.

    python scripts/compare_engines.py --data-dir ./eval --out runs/engines --vllm-python .venv-vllm/bin/python

Runs `dflash bench` on each engine, one after the other: in float32, greedy, plain and with the draft. vLLM is served as
by `dflash launch`, without and with the draft, while it is asked; without `--vllm-python` it is left out. Then `dflash
report` puts the records on one page. A run that was cut short goes on where it stood. Use it on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dflash.errors import DFlashError, EngineError
from dflash.launch.locate import pair_problems, served_draft, served_target
from dflash.launch.plan import LaunchRequest, Plan
from dflash.launch.server import serving
from dflash.registry import LAUNCHERS, load_attribute

SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "2")
STOP_SECONDS = 90.0
OWN_FORMS = ("--form", "plain", "--form", "plain-exact", "--form", "dflash", "--form", "dflash-fixed")
"""By cost, as it comes; and the whole block every round, which is what the others do."""


def main() -> None:
    """Parse the command line, measure each engine, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--dataset", action="append", help=f"default: {', '.join(SETS)}")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--limit", type=int, default=32, help="prompts per set")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/engines"))
    parser.add_argument("--vllm-python", type=Path, help="interpreter of the environment that holds vLLM")
    parser.add_argument("--skip", action="append", default=[], choices=["torch", "transformers"])
    options = parser.parse_args()
    asked = ["--limit", str(options.limit), "-n", str(options.max_new_tokens), "--repeats", str(options.repeats)]
    asked += [word for name in options.dataset or SETS for word in ("--dataset", name)]
    asked += [] if options.data_dir is None else ["--data-dir", str(options.data_dir)]
    pair = ["--target", options.target, "--draft", options.draft, "--dtype", "float32", "--device", "cpu"]
    done: list[Path] = []
    for backend, forms in (("torch", OWN_FORMS), ("transformers", ())):
        if backend not in options.skip:
            done.append(measure(backend, [*pair, *asked, *forms], options.out / backend))
    if options.vllm_python is not None:
        with ExitStack() as servers:
            urls = [
                servers.enter_context(served(options, options.out / f"vllm-{kind}.log", kind == "plain"))
                for kind in ("plain", "draft")
            ]
            words = ["--plain-url", urls[0], "--url", urls[1]]
            done.append(measure("vllm", [*words, *asked], options.out / "vllm"))
    dflash("report", *map(str, done), "--out", str(options.out / "report"))


def measure(backend: str, words: Sequence[str], out: Path) -> Path:
    """One run of the benchmark, or the rest of one."""
    place = "--resume" if (out / "batches.jsonl").is_file() else "--out"
    dflash("bench", "--backend", backend, *words, place, str(out))
    return out


def dflash(*words: str) -> None:
    """One command of this package, its output shown; ends this script where it fails."""
    done = subprocess.run([sys.executable, "-m", "dflash", *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


@contextmanager
def served(options: argparse.Namespace, log: Path, plain: bool) -> Iterator[str]:
    """The address of a vLLM server, with the draft or without; its output goes to `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log.parent.mkdir(parents=True, exist_ok=True)
    plan = planned(options.target, None if plain else options.draft, options.vllm_python, port)
    with serving(plan, environment=dict(os.environ), log=log, grace_seconds=STOP_SECONDS):
        yield plan.url


def planned(target: str, draft: str | None, python: Path, port: int) -> Plan:
    """What `dflash launch vllm` would run on a CPU, in float32. Raises EngineError where vLLM cannot serve the pair."""
    found = served_target(target)
    theirs = None if draft is None else served_draft(draft, found)
    request = LaunchRequest(
        target=found, draft=theirs, platform="cpu", port=port, python=str(python), flags=FLAGS, environment=os.environ
    )
    plan: Plan = load_attribute(LAUNCHERS["vllm"])(request)
    problems = [*plan.problems, *([] if theirs is None else pair_problems(theirs, found))]
    if problems:
        raise EngineError(f"vLLM cannot serve this: {'; '.join(problems)}")
    return plan


if __name__ == "__main__":
    try:
        main()
    except DFlashError as error:
        sys.exit(str(error))
