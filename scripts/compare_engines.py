"""One table of this engine, Transformers' own DFlash and the real vLLM, with the same target, draft and prompts.

    python scripts/compare_engines.py --data-dir ./eval --out runs/engines --vllm-python .venv-vllm/bin/python

Runs `dflash bench` on each engine, one after the other: in float32, greedy, plain and with the draft. vLLM is served by
`dflash launch`, without and with the draft, while it is asked; without `--vllm-python` it is left out. Then `dflash
report` puts the records on one page. A run that was cut short goes on where it stood. Use it on a quiet machine.
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
READY_SECONDS, STOP_SECONDS = 900.0, 90.0


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
    for backend in ("torch", "transformers"):
        if backend not in options.skip:
            done.append(measure(backend, [*pair, *asked], options.out / backend))
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
    """The address of a vLLM server, with the draft or without."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log.parent.mkdir(parents=True, exist_ok=True)
    words = ["launch", "vllm", options.target, *([] if plain else [options.draft]), *(["--no-draft"] if plain else [])]
    words += ["--platform", "cpu", "--python", str(options.vllm_python), "--port", str(port)]
    words += ["--", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "2"]
    with log.open("wb") as output:
        command = subprocess.Popen(
            [sys.executable, "-m", "dflash", *words], stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + READY_SECONDS
        while f"ready on http://127.0.0.1:{port}" not in log.read_text(encoding="utf-8", errors="replace"):
            if command.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"vLLM did not start; its output is in {log}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        command.send_signal(signal.SIGINT)
        command.wait(STOP_SECONDS)


if __name__ == "__main__":
    main()
