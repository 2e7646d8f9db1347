"""Speeds of all ways to draft, side by side in one process: `python scripts/measure_modes.py SET.jsonl ... [options]`.

For every prompt all forms run in turn, several times over (ABAB ...), so that whatever the machine does hits all of
them alike; a form's time on a prompt is its median. Prints per set and in all: tokens per second, the ratio to the
faster plain form and to the fixed full-block chain, the acceptance length, the share of overhead, the slowest prompt,
and whether the tokens are those of bit-exact plain decoding. Run it alone on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash import Drafting, Engine, Result, SamplingParams, load
from dflash.prepare.prompts import read_prompts


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


@dataclass
class Record:
    """All runs of one form: per prompt the seconds of its repeats, and the last result."""

    seconds: list[list[float]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def medians(self) -> list[float]:
        """Decode seconds per prompt."""
        return [statistics.median(times) for times in self.seconds]

    @property
    def speed(self) -> float:
        """Tokens per second over all prompts."""
        return sum(sum(result.stats.acceptance_lengths) for result in self.results) / sum(self.medians)

    def speeds(self) -> list[float]:
        """Tokens per second of each prompt."""
        pairs = zip(self.results, self.medians, strict=True)
        return [sum(result.stats.acceptance_lengths) / seconds for result, seconds in pairs]


def measure(engine: Engine, path: Path, forms: list[Form], options: argparse.Namespace) -> dict[str, Record]:
    """All forms on the prompts of one file, in turn."""
    params = SamplingParams(
        max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_p=options.top_p, seed=options.seed
    )
    records = {form.name: Record() for form in forms}
    for prompt in read_prompts(path, limit=options.limit):
        times: dict[str, list[float]] = {form.name: [] for form in forms}
        results: dict[str, Result] = {}
        for _ in range(options.repeats):
            for form in forms:
                result = engine.generate(
                    prompt.opening(), params, use_draft=form.use_draft, exact=form.exact, drafting=form.drafting
                )
                times[form.name].append(result.stats.decode_seconds)
                results[form.name] = result
        if results["plain"].stats.num_rounds < options.least:
            continue  # too short to say anything
        for form in forms:
            records[form.name].seconds.append(times[form.name])
            records[form.name].results.append(results[form.name])
    return records


def summary(records: dict[str, Record]) -> dict[str, Any]:
    """Figures of one set (or of several together), per form."""
    bases = [records[name] for name in ("plain", "plain-exact") if name in records]
    plain = max(base.speed for base in bases)
    by_prompt = [max(speeds) for speeds in zip(*(base.speeds() for base in bases), strict=True)]
    reference = records.get("plain-exact", records["plain"]).results
    figures: dict[str, Any] = {}
    for name, record in records.items():
        stats = [result.stats for result in record.results]
        decode = sum(one.decode_seconds for one in stats)
        num_tokens = sum(sum(one.acceptance_lengths) for one in stats)
        ratios = [ours / base for ours, base in zip(record.speeds(), by_prompt, strict=True)]
        reasons: dict[str, int] = {}
        for one in stats:
            for reason, count in one.reasons.items():
                reasons[reason] = reasons.get(reason, 0) + count
        figures[name] = {
            "tokens_per_second": record.speed,
            "over_plain": record.speed / plain,
            "over_fixed": record.speed / records["fixed"].speed if "fixed" in records else None,
            "slowest_prompt_over_plain": min(ratios),
            "acceptance_length": num_tokens / sum(one.num_rounds for one in stats),
            "overhead_share": sum(one.overhead_seconds for one in stats) / decode,
            "draft_share": sum(one.draft_seconds for one in stats) / decode,
            "same_tokens": sum(
                ours.token_ids == theirs.token_ids for ours, theirs in zip(record.results, reference, strict=True)
            ),
            "num_prompts": len(stats),
            "rounds_by_choice": reasons,
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
    parser.add_argument("--json", type=Path, help="write the record here as well")
    options = parser.parse_args()
    forms = [form for form in FORMS if form.name in options.forms.split(",")]
    engine = load(options.target, options.draft, dtype=options.dtype, num_threads=options.threads)
    engine.generate("Hello", SamplingParams(max_new_tokens=16))
    together = {form.name: Record() for form in forms}
    figures: dict[str, Any] = {}
    for path in options.sets:
        records = measure(engine, path, forms, options)
        figures[path.stem] = summary(records)
        show(path.stem, figures[path.stem])
        for name, record in records.items():
            together[name].seconds += record.seconds
            together[name].results += record.results
    figures["all"] = summary(together)
    show("all sets", figures["all"])
    if options.json is not None:
        options.json.write_text(json.dumps({"options": vars(options), "figures": figures}, default=str, indent=1))


if __name__ == "__main__":
    main()
