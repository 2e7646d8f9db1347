"""What the rule of drafting gains and where it loses, replayed on recorded answers: no model, no clock, repeatable.

    python scripts/replay_rounds.py record TRACES.gz SET.jsonl ... [--skip N] [--limit N] [--temperature T] [--top-p P]
    python scripts/replay_rounds.py replay TRACES.gz ... --verify 1:1 2:1.05 4:1.15 8:1.43 16:2 --draft 0.3

`record` decodes the prompts of each set once and keeps what the draft proposes behind every token. `replay` runs the
real drafters over that, on a clock that the costs given drive (in plain steps, verify forwards by their rows), and
prints speed-ups over plain decoding for every way to draft, what hindsight would have reached, and what was lost with
what. A change of the rule is judged here first: tune on one file, report on another (`--skip`), then measure
(`measure_modes.py`).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from dflash.bench.oracles import best_width, hindsight, losses
from dflash.bench.replay import Costs, Replayed, overall, replay
from dflash.bench.traces import Trace, read_traces, record, write_traces
from dflash.core.bigrams import Bigrams, read_bigrams
from dflash.prepare.prompts import read_prompts
from dflash.types import Drafting, SamplingParams

FORMS = {
    "fixed": Drafting(fixed=True),
    "no-copy": Drafting(mode="exact", copies=False),
    "exact": Drafting(mode="exact"),
    "auto": Drafting(),
    "fast": Drafting(mode="fast"),
}


def recorded(options: argparse.Namespace) -> Iterator[Trace]:
    """The answers of the prompts asked for, one after the other."""
    from dflash import load  # replaying needs no library of models

    engine = load(options.target, options.draft, dtype=options.dtype, num_threads=options.threads)
    params = SamplingParams(
        max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_p=options.top_p, seed=options.seed
    )
    for path in options.sets:
        for prompt in read_prompts(path, limit=options.skip + options.limit)[options.skip :]:
            trace = record(engine, f"{path.stem}/{prompt.id}", engine.tokenize(prompt.opening()), params)
            print(f"{trace.name}: {len(trace.answer_ids)} tokens", flush=True)
            yield trace


def replayed(
    traces: Sequence[Trace], costs: Costs, drafting: Drafting, *, fresh: bool, bigrams: Bigrams | None = None
) -> list[Replayed]:
    """All answers on one engine, or (`fresh`) each on an engine of its own."""
    memory = None if fresh else costs.memory()
    return [replay(trace, costs, drafting, memory, bigrams=bigrams) for trace in traces]


def show(
    traces: Sequence[Trace],
    costs: Costs,
    forms: Sequence[str],
    *,
    fresh: bool,
    each: bool,
    bigrams: Bigrams | None,
) -> None:
    """Tables on standard output."""
    print(
        f"{'form':10}{'x plain':>9}{'slowest':>9}{'tau':>7}{'drafts':>8}{'rows':>7}  lost per token: rows asked missed"
    )
    results = {form: replayed(traces, costs, FORMS[form], fresh=fresh, bigrams=bigrams) for form in forms}
    for form, found in results.items():
        num_rounds = sum(len(one.rounds) for one in found)
        num_tokens = sum(len(step.tokens) for one in found for step in one.rounds)
        rows = sum(step.num_proposed + 1 for one in found for step in one.rounds)
        lost: Counter[str] = Counter()
        for one in found:
            lost.update(losses(one, costs))
        print(
            f"{form:10}{overall(found):9.3f}{min(one.speed_up for one in found):9.3f}{num_tokens / num_rounds:7.2f}"
            f"{sum(len(one.asked) for one in found) / num_rounds:8.2f}{rows / num_rounds:7.2f}  "
            + " ".join(f"{lost[name] / num_tokens:.3f}" for name in ("rows", "asked", "missed"))
        )
        reasons = Counter(step.reason or "fixed" for one in found for step in one.rounds)
        print("          " + ", ".join(f"{count} {reason}" for reason, count in reasons.most_common()))
    plain = sum(costs.verify.at(1, len(trace.prompt_ids) + at) for trace in traces for at in range(len(trace.tables)))
    slots = max(len(table.ids) for trace in traces for table in trace.tables)
    rows, seconds = best_width(traces, costs, range(1, slots + 2))
    print(f"best fixed width: {rows} rows {plain / seconds:.3f}")
    for name, choice in (
        ("draft and copies", {}),
        ("draft alone", {"use_copies": False}),
        ("copies alone", {"use_draft": False}),
    ):
        print(f"hindsight, {name}: {plain / sum(hindsight(trace, costs, **choice)[0] for trace in traces):.3f}")
    for number, trace in enumerate(traces if each else ()):
        print(f"{trace.name:40}" + " ".join(f"{form} {results[form][number].speed_up:.2f}" for form in forms))


def cost_point(text: str) -> tuple[int, float]:
    """ROWS:STEPS."""
    rows, _, steps = text.partition(":")
    return int(rows), float(steps)


def main() -> None:
    """Read the command line; record or replay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="decode prompts once and keep what the draft proposes")
    one.add_argument("traces", type=Path, help="the file to write")
    one.add_argument("sets", nargs="+", type=Path, help="JSONL files with a prompt per line")
    one.add_argument("--target", default="smollm2-135m")
    one.add_argument("--draft", default="auto")
    one.add_argument("--skip", type=int, default=0, help="prompts of each set to leave out first")
    one.add_argument("--limit", type=int, default=3, help="prompts of each set")
    one.add_argument("-n", "--max-new-tokens", type=int, default=128)
    one.add_argument("--temperature", type=float, default=0.0)
    one.add_argument("--top-p", type=float, default=1.0)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--dtype")
    one.add_argument("--threads", type=int)
    two = commands.add_parser("replay", help="run the rule over recorded answers")
    two.add_argument("traces", nargs="+", type=Path)
    two.add_argument("--verify", nargs="+", type=cost_point, default=[(1, 1.0), (16, 2.0)], metavar="ROWS:STEPS")
    two.add_argument("--draft", type=float, default=0.25, help="a draft's forward, in plain steps")
    two.add_argument("--forms", default="fixed,no-copy,exact,auto,fast", help="comma-separated")
    two.add_argument("--fresh", action="store_true", help="every answer on an engine that has learned nothing yet")
    two.add_argument("--bigrams", type=Path, metavar="FOLDER", help="a draft's folder, for the counts in it")
    two.add_argument("--each", action="store_true", help="a line per answer as well")
    options = parser.parse_args()
    if options.command == "record":
        print(f"{write_traces(options.traces, recorded(options))} answers in {options.traces}")
        return
    bigrams = None if options.bigrams is None else read_bigrams(options.bigrams, 1 << 31)
    for path in options.traces:
        print(f"\n{path}")
        costs = Costs.through(dict(options.verify), options.draft)
        traces = [trace for trace in read_traces(path) if trace.tables]  # an answer of one token has nothing to draft
        show(traces, costs, options.forms.split(","), fresh=options.fresh, each=options.each, bigrams=bigrams)


if __name__ == "__main__":
    main()
