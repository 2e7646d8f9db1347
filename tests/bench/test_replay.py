"""Replays on small made-up traces: times by hand, hindsight by trying everything, the tool's own output."""

from __future__ import annotations

import itertools
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash.bench.oracles import best_width, hindsight, losses, reaches
from dflash.bench.replay import Costs, overall, replay
from dflash.bench.traces import Trace, read_traces, write_traces
from dflash.errors import DataError
from dflash.types import MODES, CandidateTable, Drafting

SCRIPT = Path(__file__).parents[2] / "scripts" / "replay_rounds.py"
SLOTS = 3
STOP = 10**6 + 2
COSTS = Costs.through({1: 1.0, 4: 1.3, 16: 2.5}, 0.25)


def made_up(
    name: str, *, seed: int, share: float, length: int = 60, stopped: bool = True, second: float = 0.0
) -> Trace:
    """An answer whose every token is right in the draft with probability `share`, and known to it; the first third
    returns at the end, to be copied. `second`: share of its second choices that are right where the first is wrong."""
    rng = np.random.default_rng(seed)
    fresh = [int(token) for token in rng.permutation(10**5)[:length]]
    answer = [*fresh[: length * 2 // 3], *fresh[: length // 3], STOP]
    tables = []
    for at in range(len(answer) - 1):
        ids, log_probs = [], []
        for slot in range(SLOTS):
            claim = float(np.clip(rng.beta(2, 2 / share - 2), 0.02, 0.98))
            token = answer[at + 1 + slot] if at + 1 + slot < len(answer) and rng.random() < claim else -2
            other = answer[at + 1 + slot] if token == -2 and slot < len(answer) - 1 - at else -3
            ids.append([token, other if rng.random() < second else -4])
            log_probs.append([math.log(claim), math.log((1 - claim) / 2)])
        tables.append(CandidateTable(ids, log_probs))
    return Trace(
        name=name,
        prompt_ids=(10**6, 10**6 + 1),
        answer_ids=tuple(answer),
        stopped=stopped,
        temperature=0.0,
        tables=tuple(tables),
        chances=({},) * len(answer),
    )


TRACES = [made_up(f"set/{seed}", seed=seed, share=0.6, stopped=seed % 2 == 0) for seed in range(4)]


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    """Fault: rounding or a lost field changes what the rule sees; a file of anything else is not refused."""
    path = tmp_path / "traces.gz"
    assert write_traces(path, TRACES) == 4
    for written, read in zip(TRACES, read_traces(path), strict=True):
        assert (read.answer_ids, read.stopped, read.name) == (written.answer_ids, written.stopped, written.name)
        assert [table.ids for table in read.tables] == [table.ids for table in written.tables]
        np.testing.assert_allclose(
            [table.log_probs for table in read.tables], [table.log_probs for table in written.tables], atol=1e-5
        )
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="holds no traces"):
        list(read_traces(path))


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name)
def test_whole_blocks_take_the_time_of_a_walk_by_hand(trace: Trace) -> None:
    """Fault: a table of another anchor, a forward that is not counted, a round too many at the end."""
    answer, at, seconds, lengths = trace.answer_ids, 0, 0.0, []
    while at < len(answer) - 1:
        budget = SLOTS if trace.stopped else min(SLOTS, len(answer) - 2 - at)
        guesses = [ids[0] for ids in trace.tables[at].ids[:budget]]
        pairs = enumerate(zip(guesses, answer[at + 1 :], strict=False))
        right = next((slot for slot, (guess, token) in pairs if guess != token), min(budget, len(answer) - 1 - at))
        seconds += COSTS.verify.at(1 + budget, 0) + (COSTS.draft if budget else 0.0)
        lengths.append(min(right + 1, len(answer) - 1 - at))
        at += lengths[-1]
    found = replay(trace, COSTS, Drafting(fixed=True))
    assert [len(step.tokens) for step in found.rounds] == lengths
    assert found.seconds == pytest.approx(seconds)
    assert found.plain_seconds == pytest.approx(len(answer) - 1)
    assert found.stats.acceptance_lengths == lengths


def test_the_rule_lies_between_the_best_width_and_hindsight() -> None:
    """Fault: a replay whose drafter does not decide, or an oracle that it could beat."""
    memory = COSTS.memory()
    ours = [replay(trace, COSTS, Drafting(mode="exact"), memory) for trace in TRACES]
    seconds = sum(one.seconds for one in ours)
    width, fixed = best_width(TRACES, COSTS, range(1, SLOTS + 2))
    assert sum(hindsight(trace, COSTS)[0] for trace in TRACES) < seconds < fixed
    assert 1 < width <= SLOTS + 1
    assert overall(ours) > 1
    assert any("copy" in step.reason for one in ours for step in one.rounds)


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("choice", [{}, {"use_draft": False}, {"use_copies": False}])
def test_hindsight_is_the_best_of_all_schedules(stopped: bool, choice: dict[str, bool]) -> None:
    """Fault: the dynamic programme misses a schedule, or finds one that cannot be. Every sequence of choices is tried
    on an answer of ten tokens."""
    trace = made_up("set/short", seed=5, share=0.7, length=9, stopped=stopped)
    found, last = reaches(trace), len(trace.answer_ids) - 1
    assert max(reach.copies for reach in found) > 0
    options = [("plain", 0)] + [(kind, count) for kind in ("copies", "draft", "either") for count in range(1, 4)]
    if not choice.get("use_draft", True):
        options = [(kind, count) for kind, count in options if kind in ("plain", "copies")]
    if not choice.get("use_copies", True):
        options = [(kind, count) for kind, count in options if kind in ("plain", "draft")]
    best = math.inf
    for num_rounds in range(1, 5):  # more rounds are plain steps in between, which are tried at their end
        for plan in itertools.product(options, repeat=num_rounds):
            at, seconds = 0, 0.0
            for kind, count in plan:
                if at >= last or count > (getattr(found[at], kind) if count else 0):
                    break
                seconds += COSTS.verify.at(1 + count, 0) + (COSTS.draft if kind in ("draft", "either") else 0.0)
                at = min(at + 1 + count, last)
            else:
                best = min(best, seconds + hindsight(trace, COSTS, **choice)[at])
    assert hindsight(trace, COSTS, **choice)[0] == pytest.approx(best)
    assert hindsight(trace, COSTS, **choice)[-1] == 0


@pytest.mark.parametrize("drafting", [Drafting(mode="exact"), Drafting(fixed=True), Drafting(mode="fast")], ids=str)
def test_losses_add_up_to_the_distance_from_hindsight(drafting: Drafting) -> None:
    """Fault: time that no line of the table explains."""
    for trace in TRACES:
        found = replay(trace, COSTS, drafting)
        lost = losses(found, COSTS)
        assert sum(lost.values()) == pytest.approx(found.seconds - hindsight(trace, COSTS)[0])
        assert lost["rows"] >= 0
        assert lost["asked"] >= 0


@pytest.mark.parametrize(("per_row", "second", "taken"), [(0.01, 0.8, True), (0.01, 0.0, False), (0.3, 0.8, False)])
def test_trees_are_taken_where_they_really_bring_ten_per_cent(per_row: float, second: float, taken: bool) -> None:
    """Fault: mode "auto" judges trees by anything else than the tokens and the time of whole rounds, the draft's
    included (it saw half of their gain), or takes them, leaves them and takes them again."""
    costs = Costs.through({1: 1.0, 2: 1 + per_row, 16: 1 + 15 * per_row}, 0.2)
    traces = [made_up(f"set/{seed}", seed=seed, share=0.45, second=second, length=150) for seed in range(6)]
    speeds = {}
    for mode in MODES:
        memory = costs.memory()
        found = [replay(trace, costs, Drafting(mode=mode, copies=False), memory) for trace in traces]
        speeds[mode] = overall(found[2:])
        lessons = memory.at(0.0)
        if mode == "auto":
            judged = lessons.tree.value / lessons.chain.value
            trees = [any(step.num_slots != step.num_proposed for step in one.rounds) for one in found]
    assert judged == pytest.approx(speeds["fast"] / speeds["exact"], rel=0.05)
    assert trees == [False, *[taken] * 5] or trees == [taken] * 6
    if taken:
        assert speeds["auto"] == pytest.approx(speeds["fast"], rel=0.03)
        assert speeds["auto"] > 1.1 * speeds["exact"]


def test_the_tool_replays_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: the command of the page does not run, or two runs differ."""
    path = tmp_path / "traces.gz"
    write_traces(path, TRACES)
    arguments = ["replay", str(path), "--verify", "1:1", "4:1.3", "16:2.5", "--draft", "0.25", "--each"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    shown = []
    for _ in range(2):
        runpy.run_path(str(SCRIPT), run_name="__main__")
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    fixed = overall([replay(trace, COSTS, Drafting(fixed=True)) for trace in read_traces(path)])
    assert f"fixed     {fixed:9.3f}" in shown[0]
    assert "hindsight, draft and copies" in shown[0]
    assert shown[0].count("set/") == len(TRACES)
