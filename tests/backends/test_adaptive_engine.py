"""Drafting by cost on every backend: same bits in every mode, copies without a model, measured costs."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash import Drafting, SamplingParams
from dflash.cli.report import stats_line, stats_record
from dflash.core import calibration
from dflash.core.calibration import MOST_KEPT, Times, costs_path, load_costs, measure, write_costs
from dflash.core.cost import DRAFT_WORD, CostCurve, CostTracker
from dflash.core.drafting import CopyDrafter
from dflash.core.engine import NO_TREES, Engine
from dflash.core.memory import TREE_ROUNDS, Memory
from tests.backends.pairs import GREEDY, PROMPTS, SAMPLED, OpenEngine, PlainTexts

CHOICES = [
    Drafting(),
    Drafting(mode="exact"),
    Drafting(mode="exact", copies=False),
    Drafting(mode="fast", draws=False),
    Drafting(fixed=True),
]
REPEATED = "one two three four, one two three four, one two three four, one two"
FREE_ROWS = CostCurve((1, 64), (0,), ((1.0, 1.0),))
DEARER_ROWS = CostCurve((1, 64), (0,), ((1.0, 4.0),))
"""Costs that a test gives go with `steady`: a busy machine must not decide what is asserted."""


@pytest.mark.parametrize(
    ("rows_are_free", "drafting"),
    [(free, how) for free in (True, False) for how in CHOICES if free or not how.fixed],  # fixed: whatever rows cost
    ids=str,
)
def test_every_choice_gives_the_plain_tokens(
    trained: Engine, plain_texts: PlainTexts, rows_are_free: bool, drafting: Drafting
) -> None:
    """Fault: a cut, a copy, a branch or a skipped draft forward that changes the text; float32, greedy and sampled,
    with costs under which everything is fed, and with those that rounds have, under which less is."""
    if drafting.mode == "fast" and not trained.target.session().supports_trees:
        pytest.skip("without trees this is mode exact")
    trained.memory = Memory(CostTracker(FREE_ROWS if rows_are_free else None))
    requests = list(itertools.product((PROMPTS[0], REPEATED), (GREEDY, SAMPLED)))
    for prompt, params in requests if rows_are_free else (requests[1], requests[2]):
        drafted = trained.generate(prompt, params, drafting=drafting)
        assert drafted.token_ids == plain_texts(prompt, params).token_ids
        assert sum(drafted.stats.rows.values()) == drafted.stats.num_rounds
        if not drafting.fixed:
            assert sum(drafted.stats.reasons.values()) in (drafted.stats.num_rounds, drafted.stats.num_rounds - 1)
            assert sum(drafted.stats.accepted_by_source.values()) == drafted.stats.num_accepted


def test_a_draft_that_knows_the_answer_is_used_and_a_random_one_rests(
    open_engine: OpenEngine, trained: Engine, target_folder: Path, draft_folder: Path
) -> None:
    """Fault: the table of candidates is shifted or badly scaled, so that a good draft looks bad."""
    drafting = Drafting(mode="exact", copies=False, steady=True)
    trained.memory = Memory(CostTracker(DEARER_ROWS))
    good = trained.generate(PROMPTS[0], GREEDY, drafting=drafting)
    assert good.stats.acceptance_length > 4
    noise = open_engine(target_folder, draft_folder)
    noise.memory = Memory(CostTracker(DEARER_ROWS))
    bad = noise.generate(PROMPTS[0], GREEDY, drafting=drafting)
    assert bad.stats.reasons.get("plain", 0) > GREEDY.max_new_tokens / 2
    noise.close()


def test_trees_are_fed_in_mode_fast(trained: Engine) -> None:
    """Fault: mode "fast" is accepted and does nothing."""
    session = trained.target.session()
    if not session.supports_trees:
        pytest.skip("this backend takes chains only")
    trained.memory = Memory(CostTracker(FREE_ROWS))
    stats = trained.generate(PROMPTS[2], SAMPLED, drafting=Drafting(mode="fast", draws=False, steady=True)).stats
    assert stats.num_proposed > sum(stats.proposed_per_slot)
    assert stats.notes[0].startswith("trees in ")
    assert stats.notes[0] in stats_line(stats)
    assert stats_record(stats)["notes"] == stats.notes


def test_mode_fast_says_that_it_cannot(trained: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: trees are asked for, chains are fed, and nobody is told."""
    session = type(trained.target.session())
    monkeypatch.setattr(session, "supports_trees", property(lambda _: False))
    for drafting, told in ((Drafting(mode="fast"), [NO_TREES]), (Drafting(), []), (Drafting(fixed=True), [])):
        assert trained.generate(PROMPTS[0], GREEDY, drafting=drafting).stats.notes == told


def test_mode_auto_says_that_it_took_trees_and_why(trained: Engine) -> None:
    """Fault: bit-exactness is left for trees, and nobody is told."""
    if not trained.target.session().supports_trees:
        pytest.skip("this backend takes chains only")
    quiet = trained.generate(PROMPTS[2], SAMPLED, drafting=Drafting()).stats
    assert quiet.notes == []
    trained.memory = Memory(CostTracker(FREE_ROWS))
    lessons = trained.memory.at(SAMPLED.temperature)
    for _ in range(TREE_ROUNDS):
        lessons.chain.add(1.0, 1.0)
        lessons.tree.add(100.0, 1.0)
    stats = trained.generate(PROMPTS[2], SAMPLED, drafting=Drafting(steady=True)).stats
    assert stats.num_proposed > sum(stats.proposed_per_slot)
    assert "times the speed of chains" in stats.notes[0]


def test_copies_need_no_model(open_engine: OpenEngine, target_folder: Path) -> None:
    """Fault: `--draft ngram` wants a draft's files, records features, or is not lossless."""
    engine = open_engine(target_folder, "ngram")
    assert isinstance(engine.drafter, CopyDrafter)
    assert (engine.info.draft, engine.info.block_size, engine.info.draft_sha256) == ("ngram", None, None)
    engine.memory = Memory(CostTracker(FREE_ROWS))
    for drafting in (Drafting(steady=True), Drafting(fixed=True)):
        for params in (GREEDY, SAMPLED):
            plain = engine.generate(REPEATED, params, use_draft=False)
            copied = engine.generate(REPEATED, params, drafting=drafting)
            assert copied.token_ids == plain.token_ids
            assert copied.stats.num_proposed > 0
            assert set(copied.stats.accepted_by_source) <= {"copy"}
            assert not [reason for reason in copied.stats.reasons if DRAFT_WORD in reason]
    record = stats_record(engine.generate(REPEATED, GREEDY).stats)
    assert json.loads(json.dumps(record)) == record
    engine.close()


def test_measured_costs_are_kept_and_damage_is_measured_anew(trained: Engine, tmp_path: Path) -> None:
    """Fault: every load measures again, a half-written file stops loading, or another pair's costs are used."""
    assert trained.drafter is not None
    verify, draft = measure(
        trained.target, trained.drafter, trained.device(), exact=True, max_rows=16, seconds=0
    ).curves()
    assert verify.rows == (1, 2, 4, 8, 16)
    assert draft is not None
    assert draft.at(1, 0) > 0
    slopes = [after - before for before, after in zip(verify.seconds[0], verify.seconds[0][1:], strict=False)]
    assert all(slope >= 0 for slope in slopes)
    path = costs_path(trained.info, trained.device(), trained.max_rows)
    assert path.is_file()  # loading measured and kept it
    write_costs(path, CostCurve.guess(7.0), None)
    known = load_costs(trained.target, trained.drafter, trained.info, trained.device(), max_rows=trained.max_rows)
    assert known.verify(1, 0) == 7.0
    os.utime(path, (1.0, 1.0))
    load_costs(trained.target, trained.drafter, trained.info, trained.device(), max_rows=trained.max_rows)
    assert path.stat().st_mtime > 1  # used: the last to be dropped
    path.write_text("{")
    anew = load_costs(trained.target, trained.drafter, trained.info, trained.device(), max_rows=trained.max_rows)
    assert 0 < anew.verify(1, 0) < 7.0
    assert json.loads(path.read_text())["verify"]["rows"] == [1, 2, 4, 8, 16]
    write_costs(tmp_path / "file" / "x", verify, draft)
    for number in range(MOST_KEPT + 3):
        write_costs(tmp_path / "many" / f"{number}.json", verify, draft)
    assert len(list((tmp_path / "many").iterdir())) == MOST_KEPT
    assert (tmp_path / "many" / f"{MOST_KEPT + 2}.json").is_file()
    (tmp_path / "plain").write_text("")
    write_costs(tmp_path / "plain" / "x", verify, draft)  # a cache that cannot be written is no error


def test_a_quick_measurement_goes_on_until_its_time_is_up(trained: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: loading times every width once or twice and takes what a busy moment gave, or does not know its time."""
    readings = 0

    def clock() -> float:
        nonlocal readings
        readings += 1
        return 0.01 * readings

    measure(trained.target, None, trained.device(), exact=True, max_rows=16, seconds=1.2, clock=clock)
    assert readings > 1.2 / 0.01
    asked: list[float] = []

    def told(*_: object, seconds: float, **__: object) -> Times:
        asked.append(seconds)
        return Times({(64, 1): [1.0]}, {}, None, 64)

    assert trained.drafter is not None
    costs_path(trained.info, trained.device(), 7).unlink(missing_ok=True)
    monkeypatch.setattr(calibration, "measure", told)
    monkeypatch.setattr(calibration, "QUICK_SECONDS", 3.5)
    load_costs(trained.target, trained.drafter, trained.info, trained.device(), max_rows=7)
    assert asked == [3.5]


def test_slow_forwards_are_timed_once(trained: Engine) -> None:
    """Fault: where a forward takes seconds, loading sweeps over all widths for minutes."""
    readings = 0

    def clock() -> float:
        nonlocal readings
        readings += 1
        return 4.0 * readings  # whatever is timed takes four seconds

    verify, draft = measure(
        trained.target, None, trained.device(), exact=True, max_rows=16, seconds=9.0, clock=clock
    ).curves()
    assert draft is None
    assert verify.rows == (1, 2, 4, 8, 16)
    assert verify.depths == (64,)
    assert verify.at(16, 64) == pytest.approx(4.0)
    assert readings == 2 + 2 * len(verify.rows)


def test_times_of_several_measurements_are_one() -> None:
    """Fault: times are lost or mixed up when they are added, or the least of all counts though there are many."""
    parts = [
        Times({(64, 1): [1.0 + n], (64, 8): [2.0 + n]}, {1: [1.5 + n], 8: [4.5 + n]}, [0.1 * (1 + n)], 64)
        for n in range(7)
    ]
    total = parts[0]
    for part in parts[1:]:
        total += part
    verify, draft = total.curves()
    assert (verify.rows, verify.depths) == ((1, 8), (64, 2048))
    assert verify.seconds == pytest.approx(np.array([[4.0, 5.0], [4.5, 7.5]]))
    assert draft is not None
    assert draft.at(1, 64) == pytest.approx(0.4)
    verify, draft = (Times({(64, 1): [3.0]}, {}, None, 64) + Times({(64, 1): [2.0]}, {}, [1.0], 64)).curves()
    assert (verify.seconds, draft) == (((2.0,),), None)


def test_measuring_leaves_no_trace(trained: Engine) -> None:
    """Fault: the measurement's rows stay in a session or in the draft, and the next text starts from them."""
    before = trained.generate(PROMPTS[0], GREEDY).token_ids
    measure(trained.target, trained.drafter, trained.device(), exact=False, max_rows=8, seconds=0)
    assert trained.generate(PROMPTS[0], GREEDY).token_ids == before


def test_record_of_choices(trained: Engine) -> None:
    """Fault: statistics do not say what was chosen."""
    stats = trained.generate(PROMPTS[0], SamplingParams(max_new_tokens=30, ignore_eos=True)).stats
    record: dict[str, Any] = stats_record(stats)
    assert record["rounds_by_choice"] == stats.reasons
    assert record["rounds_by_rows"] == {str(rows): count for rows, count in sorted(stats.rows.items())}
    assert record["accepted_by_source"] == stats.accepted_by_source
