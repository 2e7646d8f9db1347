"""Speeds of all ways to draft, side by side in one process: `python scripts/measure_modes.py SET.jsonl ... [options]`.

For every prompt all forms run in turn, several times over (ABAB ...), so that whatever the machine does hits all of
them alike; a form's time on a prompt is its median. The first prompt of every set comes before the second of any.
Prints per set and in all: tokens per second, the ratio to the faster plain form and to the fixed full-block chain, the
acceptance length, the share of overhead, the slowest prompt, and whether the tokens are those of bit-exact plain
decoding (of plain decoding, where that is not among the forms: near-ties may then differ). `--out FILE` keeps a line
per prompt behind one that says what was measured; what stands there is not measured again. Run it alone on a quiet
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

from dflash import Drafting, Engine, Result, SamplingParams, __version__, load
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
        decode = stats.decode_seconds or 1.0  # no round where the first token ended the answer
        return Run(
            [round(one, 4) for one in seconds],
            sum(stats.acceptance_lengths),
            stats.num_rounds,
            round(stats.draft_seconds / decode, 4),
            round(stats.overhead_seconds / decode, 4),
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
        """A line as `main` writes it."""
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
    forms = chosen_forms(parser, options)
    engine = load(options.target, options.draft, dtype=options.dtype, num_threads=options.threads)
    what = {name: value for name, value in vars(options).items() if name not in ("out", "limit", "sets", "least")}
    what |= {"version": __version__, "device": engine.info.device, "dtype": engine.info.dtype}
    rows = known_rows(parser, options.out, what)
    engine.generate("Hello", SamplingParams(max_new_tokens=16))
    told: list[Measured] = []
    for dataset, index, prompt in prompts_in_turn(options.sets, options.limit):
        row = rows.get((dataset, index))
        if row is None:
            row = Measured(dataset, index, measure(engine, prompt, forms, options))
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        if row.runs["plain"].num_rounds >= options.least:
            told.append(row)
    for path in options.sets:
        if of_set := [row for row in told if row.dataset == path.stem]:
            show(path.stem, summary(of_set))
    if told:
        show("all sets", summary(told))


def chosen_forms(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Form]:
    """The forms by name; ends the command where they, or the sets, cannot be measured."""
    names = options.forms.split(",")
    if unknown := sorted({*names} - {form.name for form in FORMS}):
        parser.error(f"--forms: there is no {unknown[0]}; choose of {', '.join(form.name for form in FORMS)}")
    if "plain" not in names:
        parser.error("--forms needs plain, which all others are divided by")
    if len({path.stem for path in options.sets}) < len(options.sets):
        parser.error("two of the sets have the same name")
    return [form for form in FORMS if form.name in names]


def known_rows(
    parser: argparse.ArgumentParser, out: Path | None, what: dict[str, Any]
) -> dict[tuple[str, int], Measured]:
    """What stands in the record already, by set and index; a new record gets its first line. Ends the command where
    another measurement is kept there."""
    if out is None:
        return {}
    if not out.exists():
        out.write_text(json.dumps(what) + "\n")
    first, *lines = out.read_text().splitlines()
    if json.loads(first) != what:
        parser.error(f"{out} keeps another measurement; give a new file")
    return {(row.dataset, row.index): row for row in map(Measured.read, lines)}


if __name__ == "__main__":
    main()
