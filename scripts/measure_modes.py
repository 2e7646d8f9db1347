"""Speeds of all ways to draft, side by side in one process: `python scripts/measure_modes.py SET.jsonl ... [options]`.

For every prompt all forms run in turn, several times over (ABAB ...), so that whatever the machine does hits all of
them alike; a form's time on a prompt is its median. The first prompt of every set comes before the second of any.
Prints per set and in all: tokens per second, the ratio to the faster plain form and to the fixed full-block chain, the
acceptance length, the share of overhead, the slowest prompt, and whether the tokens are those of bit-exact plain
decoding. `--out FILE` keeps a line per prompt; what stands there is not measured again. Run it alone on a quiet
machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash import Drafting, Engine, Result, SamplingParams, load
from dflash.prepare.prompts import Conversation, read_prompts


@dataclass(frozen=True)
class Form:
    """One way to decode."""

    name: str
    use_draft: bool
    exact: bool | None
    drafting: Drafting | None = None


FORMS = (
    Form("plain", False, False),
    Form("plain-exact", False, None),
    Form("fixed", True, None, Drafting(fixed=True)),
    Form("no-copy", True, None, Drafting(mode="exact", copies=False)),
    Form("exact", True, None, Drafting(mode="exact")),
    Form("auto", True, None, Drafting(mode="auto")),
    Form("fast", True, None, Drafting(mode="fast")),
)


@dataclass(frozen=True)
class Run:
    """All repeats of one form on one prompt."""

    seconds: list[float]
    """Decode seconds of each repeat."""
    num_tokens: int
    """In rounds: without the one that prefill gives."""
    num_rounds: int
    draft_share: float
    """Of the last repeat's decode seconds, as the next one."""
    overhead_share: float
    reasons: dict[str, int]
    """Rounds by what was chosen, in the last repeat."""
    tokens: str
    """Fingerprint of the token ids."""

    @staticmethod
    def of(seconds: list[float], result: Result) -> Run:
        """`result`: of the last repeat."""
        stats = result.stats
        return Run(
            [round(one, 4) for one in seconds],
            sum(stats.acceptance_lengths),
            stats.num_rounds,
            round(stats.draft_seconds / stats.decode_seconds, 4),
            round(stats.overhead_seconds / stats.decode_seconds, 4),
            dict(stats.reasons),
            hashlib.sha256(json.dumps(result.token_ids).encode()).hexdigest()[:16],
        )

    @property
    def median(self) -> float:
        """Decode seconds."""
        return statistics.median(self.seconds)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.median


@dataclass(frozen=True)
class Measured:
    """A line of the record: one prompt by all forms."""

    dataset: str
    index: int
    runs: dict[str, Run]

    @staticmethod
    def read(line: str) -> Measured:
        """What `write` wrote."""
        row = json.loads(line)
        return Measured(row["dataset"], row["index"], {name: Run(**run) for name, run in row["runs"].items()})


def measure(engine: Engine, prompt: Conversation, forms: Sequence[Form], options: argparse.Namespace) -> dict[str, Run]:
    """All forms on one prompt, in turn."""
    params = SamplingParams(
        max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_p=options.top_p, seed=options.seed
    )
    seconds: dict[str, list[float]] = {form.name: [] for form in forms}
    results: dict[str, Result] = {}
    for _ in range(options.repeats):
        for form in forms:
            result = engine.generate(
                prompt.opening(), params, use_draft=form.use_draft, exact=form.exact, drafting=form.drafting
            )
            seconds[form.name].append(result.stats.decode_seconds)
            results[form.name] = result
    return {name: Run.of(seconds[name], result) for name, result in results.items()}


def prompts_in_turn(paths: Sequence[Path], limit: int) -> Iterator[tuple[str, int, Conversation]]:
    """(set, index, prompt): the first one of every set, then the second ones ..."""
    sets = {path.stem: list(read_prompts(path, limit=limit)) for path in paths}
    for index in range(limit):
        for name, prompts in sets.items():
            if index < len(prompts):
                yield name, index, prompts[index]


def summary(rows: Sequence[Measured]) -> dict[str, Any]:
    """Figures of some prompts, per form."""
    names = list(rows[0].runs)
    runs = {name: [row.runs[name] for row in rows] for name in names}
    speeds = {
        name: sum(run.num_tokens for run in each) / sum(run.median for run in each) for name, each in runs.items()
    }
    bases = [name for name in ("plain", "plain-exact") if name in names]
    plain = max(speeds[name] for name in bases)
    reference = runs.get("plain-exact", runs["plain"])
    figures: dict[str, Any] = {}
    for name, each in runs.items():
        seconds = sum(run.median for run in each)
        ratios = [run.speed / max(row.runs[base].speed for base in bases) for row, run in zip(rows, each, strict=True)]
        figures[name] = {
            "tokens_per_second": speeds[name],
            "over_plain": speeds[name] / plain,
            "over_fixed": speeds[name] / speeds["fixed"] if "fixed" in speeds else None,
            "slowest_prompt_over_plain": min(ratios),
            "acceptance_length": sum(run.num_tokens for run in each) / sum(run.num_rounds for run in each),
            "overhead_share": sum(run.overhead_share * run.median for run in each) / seconds,
            "draft_share": sum(run.draft_share * run.median for run in each) / seconds,
            "same_tokens": sum(run.tokens == theirs.tokens for run, theirs in zip(each, reference, strict=True)),
            "num_prompts": len(rows),
        }
    return figures


def show(title: str, figures: dict[str, Any]) -> None:
    """One table on standard output."""
    print(f"\n{title} ({next(iter(figures.values()))['num_prompts']} prompts)")
    heads = ("tok/s", "x plain", "x fixed", "slowest", "tau", "draft", "other")
    print(f"{'form':12}" + "".join(f"{head:>9}" for head in heads) + "  same tokens")
    for name, one in figures.items():
        fixed = "-" if one["over_fixed"] is None else f"{one['over_fixed']:.2f}"
        print(
            f"{name:12}{one['tokens_per_second']:9.1f}{one['over_plain']:9.2f}{fixed:>9}"
            f"{one['slowest_prompt_over_plain']:9.2f}{one['acceptance_length']:9.2f}{one['draft_share']:9.1%}"
            f"{one['overhead_share']:9.1%}  {one['same_tokens']}/{one['num_prompts']}"
        )


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("sets", nargs="+", type=Path, help="JSONL files with a prompt per line")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="auto", help="as of `dflash generate`; ngram = copies only")
    parser.add_argument("--forms", default="plain,plain-exact,fixed,exact,auto,fast", help="comma-separated")
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--least", type=int, default=16, help="skip prompts whose plain answer has fewer rounds")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--out", type=Path, help="JSONL record, read and continued if it exists (with the same options)"
    )
    options = parser.parse_args()
    forms = [form for form in FORMS if form.name in options.forms.split(",")]
    known: list[Measured] = []
    if options.out is not None and options.out.exists():
        known = [Measured.read(line) for line in options.out.read_text().splitlines()]
    rows = {(row.dataset, row.index): row for row in known}
    engine = load(options.target, options.draft, dtype=options.dtype, num_threads=options.threads)
    engine.generate("Hello", SamplingParams(max_new_tokens=16))
    for dataset, index, prompt in prompts_in_turn(options.sets, options.limit):
        if (dataset, index) in rows:
            continue
        row = rows[dataset, index] = Measured(dataset, index, measure(engine, prompt, forms, options))
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    told = [row for row in rows.values() if row.runs["plain"].num_rounds >= options.least]
    for path in options.sets:
        show(path.stem, summary([row for row in told if row.dataset == path.stem]))
    show("all sets", summary(told))


if __name__ == "__main__":
    main()
