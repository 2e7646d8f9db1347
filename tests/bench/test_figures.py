"""Figures from batches, against numbers worked out by hand from the fake's fixed times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dflash.bench.figures import cells, spread
from dflash.bench.record import BatchPart, CellPart, FormFigures, LoadPart, RequestPart, RoundsPart, RunRecord
from dflash.bench.report.tables import sources
from dflash.bench.run import run_benchmark
from tests.bench.fakes import DRAFTED, EXACT, PER_TOKEN, PLAIN, FakeBackend, Say, form_parts, questions, workload


def record_of(folder: Path, backend: FakeBackend | None = None, **changes: object) -> RunRecord:
    work = workload(questions(4), **changes)  # type: ignore[arg-type]
    return run_benchmark("fake", backend or FakeBackend(), work, folder, command="dflash bench").record


def figures_of(record: RunRecord, form: str) -> FormFigures:
    (cell,) = record.cells
    return next(figures for figures in cell.forms if figures.form == form)


def test_speedup_is_over_the_fastest_plain_form(tmp_path: Path) -> None:
    """Guards against dividing by the slower plain form, which flatters the draft (here by a quarter)."""
    record = record_of(tmp_path)
    assert record.cells[0].fastest_plain == "plain-exact"
    drafted = figures_of(record, "dflash")
    assert drafted.speedup is not None
    assert drafted.speedup.over == "plain-exact"
    assert drafted.speedup.basis == "decoding"
    assert drafted.speedup.repeats.median == pytest.approx(0.008 / 0.004)
    assert drafted.speedup.repeats.values == pytest.approx([2.0, 2.0])
    assert drafted.speedup.interval == pytest.approx((2.0, 2.0))
    # a round of three tokens costs 11 ms of forwards, a plain token 8 ms
    assert drafted.speedup.limit == pytest.approx(3 * 8 / 11)
    assert figures_of(record, "plain").speedup is None


def test_speeds_and_times(tmp_path: Path) -> None:
    """Guards against first tokens counted as decoded, and a prefill that counts as decoding time."""
    plain = figures_of(record_of(tmp_path), "plain")
    assert plain.decode_tokens_per_second is not None and plain.tokens_per_second is not None
    assert plain.decode_tokens_per_second.median == pytest.approx(1 / PER_TOKEN["plain"])
    assert plain.tokens_per_second.median == pytest.approx(31 / (0.020 + 30 * 0.010))
    assert plain.seconds_per_token is not None and plain.first_token_seconds is not None
    assert plain.seconds_per_token.median == pytest.approx(0.010)
    assert plain.first_token_seconds.median == pytest.approx(0.020)
    assert plain.num_tokens == 31 * 4 * 2
    assert plain.peak_memory_bytes == 123_000_000


def test_acceptance(tmp_path: Path) -> None:
    """Guards against means of means, and against plain decoding shown with an acceptance length of 1."""
    record = record_of(tmp_path)
    drafted = figures_of(record, "dflash")
    assert drafted.acceptance_length == pytest.approx(3.0)
    assert drafted.rounds is not None
    assert drafted.rounds.lengths == {3: 80}
    assert drafted.rounds.accepted_per_slot == [80, 80, 0]
    assert drafted.rounds.draft_seconds == pytest.approx(80 * 0.004)
    assert figures_of(record, "plain").acceptance_length is None
    assert figures_of(record, "plain").rounds is None


def test_same_output_is_against_the_reference_form(tmp_path: Path) -> None:
    """Guards against comparing with the wrong plain form, and against a difference that is not located."""

    def say(request: object, form: str, call: int) -> str:
        return {"plain": "abcdefgh", "plain-exact": "abcdXfgh", "dflash": "abcdXfgY"}[form] * 3

    identity = figures_of(record_of(tmp_path, FakeBackend(say=say)), "dflash").identity
    assert identity is not None
    assert (identity.reference, identity.num_compared, identity.num_same) == ("plain-exact", 8, 0)
    assert {(one.unit, one.position) for one in identity.differences} == {("token", 7)}


def test_texts_are_compared_where_no_ids_are_told(tmp_path: Path) -> None:
    """Guards against no comparison at all for servers."""
    requests = [
        RequestPart(prompt_id="p", turn=0, text=text, num_tokens=3, total_seconds=1.0) for text in ("abc", "abX")
    ]
    batches = [batch(form, [request]) for form, request in zip(("plain-exact", "dflash"), requests, strict=True)]
    (cell,) = cells(batches, form_parts([EXACT, DRAFTED]), compare_drawn=None)
    identity = cell.forms[1].identity
    assert identity is not None
    assert [(one.unit, one.position) for one in identity.differences] == [("character", 2)]


@pytest.mark.parametrize(("same_seed", "compared"), [(True, True), (False, False)])
def test_draws_are_compared_only_where_seeds_promise_it(same_seed: bool, compared: bool, tmp_path: Path) -> None:
    """Guards against "0 of 8 the same" for a server that draws anew each time."""
    record = record_of(tmp_path, FakeBackend(same_seed_same_text=same_seed), temperature=1.0)
    assert (figures_of(record, "dflash").identity is not None) is compared
    assert any("cannot be compared" in note for note in record.notes) is not compared


def test_unsteady_outputs_are_counted(tmp_path: Path) -> None:
    """Guards against an engine that answers differently each time and looks repeatable."""

    def say(request: object, form: str, call: int) -> str:
        return f"{'abc' * 9}{call}"

    assert figures_of(record_of(tmp_path / "a", FakeBackend(say=say)), "plain").num_unsteady == 4
    assert figures_of(record_of(tmp_path / "b"), "plain").num_unsteady == 0
    assert figures_of(record_of(tmp_path / "c", repeats=1), "plain").num_unsteady is None


def test_loops_and_copies_stand_beside_speed(tmp_path: Path) -> None:
    """Guards against a speed-up on degenerate output that nobody can see."""
    loop: Say = lambda request, form, call: "ab" * 15  # noqa: E731
    looping = figures_of(record_of(tmp_path, FakeBackend(say=loop)), "dflash")
    assert looping.looping_share is not None
    assert looping.looping_share > 0.8
    assert looping.share_unit == "token"


def test_missing_is_none_and_never_zero(tmp_path: Path) -> None:
    """Guards against zeros where an engine tells nothing: speeds then rest on whole answers, and the record says so."""
    record = record_of(tmp_path, FakeBackend(tells_times=False))
    drafted = figures_of(record, "dflash")
    assert drafted.first_token_seconds is None
    assert drafted.seconds_per_token is None
    assert drafted.decode_tokens_per_second is None
    assert drafted.speedup is not None
    assert drafted.speedup.basis == "whole answers"
    assert drafted.speedup.limit is None
    uncounted = [RequestPart(prompt_id="p", turn=0, text="abc", total_seconds=1.0)]
    (cell,) = cells(
        [batch("plain", uncounted), batch("dflash", uncounted)], form_parts([PLAIN, DRAFTED]), compare_drawn=None
    )
    for figures in cell.forms:
        assert (figures.num_tokens, figures.tokens_per_second, figures.acceptance_length) == (None, None, None)
        assert figures.speedup is None


def test_server_counters_stand_in_for_rounds() -> None:
    """Guards against acceptance that is missing although the server counted it."""
    request = RequestPart(prompt_id="p", turn=0, text="abc", num_tokens=6, total_seconds=1.0)
    counted = RoundsPart(num_rounds=4, num_tokens=10, num_accepted=6, accepted_per_slot=[4, 2])
    parts = [batch("dflash", [request], repeat=repeat, counters=counted) for repeat in range(2)]
    (cell,) = cells(parts, form_parts([DRAFTED]), compare_drawn=None)
    (figures,) = cell.forms
    assert figures.acceptance_length == pytest.approx(2.5)
    assert figures.rounds is not None
    assert (figures.rounds.num_rounds, figures.rounds.lengths, figures.rounds.draft_seconds) == (8, None, None)
    assert figures.speedup is None


def test_throughput_under_load_counts_wall_time_of_whole_batches() -> None:
    """Guards against adding up the times of requests that overlap, and against a batch that was cut short."""
    load = LoadPart(concurrency=4)
    request = [RequestPart(prompt_id=f"p{i}", turn=0, text="a", num_tokens=10, total_seconds=1.0) for i in range(4)]
    parts = [
        batch("plain", request, load=load, wall=2.0),
        batch("dflash", request, load=load, wall=1.0),
        batch("dflash", request[:1], load=load, wall=0.1, repeat=1, complete=False),
    ]
    (cell,) = cells(parts, form_parts([PLAIN, DRAFTED]), compare_drawn=None)
    plain, drafted = cell.forms
    assert plain.tokens_per_second is not None and drafted.tokens_per_second is not None
    assert plain.tokens_per_second.median == pytest.approx(20.0)
    assert drafted.tokens_per_second.values == pytest.approx([40.0])
    assert drafted.speedup is not None
    assert drafted.speedup.basis == "throughput"
    assert drafted.speedup.repeats.median == pytest.approx(2.0)
    assert drafted.speedup.interval is None


def test_interval_widens_with_the_prompts_differences() -> None:
    """Guards against an interval that is not one over prompts: half of them gain 1x, half 3x."""
    plain = [answered(f"p{i}", 1.0) for i in range(20)]
    drafted = [answered(f"p{i}", 1.0 if i % 2 else 1 / 3) for i in range(20)]
    parts = [batch("plain", [one]) for one in plain] + [batch("dflash", [one]) for one in drafted]
    (cell,) = cells(parts, form_parts([PLAIN, DRAFTED]), compare_drawn=None)
    speedup = cell.forms[1].speedup
    assert speedup is not None and speedup.interval is not None
    low, high = speedup.interval
    assert speedup.repeats.median == pytest.approx(1.5)
    assert 1.1 < low < 1.45 < 1.6 < high < 2.3


def test_sources_of_accepted_tokens_add_up() -> None:
    """Guards against a gain from copying that looks like the draft's."""
    request = RequestPart(prompt_id="p", turn=0, text="abc", num_tokens=6, total_seconds=1.0)
    told = [{"draft": 3, "copy": 1}, {"copy": 2, "both": 2}, None]
    parts = [
        batch("dflash", [request], repeat=i, counters=RoundsPart(num_rounds=4, num_tokens=10, accepted_by_source=one))
        for i, one in enumerate(told)
    ]
    (cell,) = cells(parts, form_parts([DRAFTED]), compare_drawn=None)
    rounds = cell.forms[0].rounds
    assert rounds is not None
    assert rounds.accepted_by_source == {"both": 2, "copy": 3, "draft": 3}
    assert sources(rounds) == "62%"
    assert sources(None) == sources(RoundsPart(num_rounds=1, num_tokens=1)) == "–"


def test_every_load_and_set_has_its_cell(tmp_path: Path) -> None:
    """Guards against loads that are mixed."""
    work = workload(questions(2), questions(2, name="b"), loads=[LoadPart(), LoadPart(concurrency=2)])
    backend = FakeBackend(max_concurrency=4)
    found: list[CellPart] = run_benchmark("fake", backend, work, tmp_path, command="c").record.cells
    labels = [(cell.data_set, cell.load.label) for cell in found]
    assert labels == [(name, load) for name in ("fake-set", "b") for load in ("1 at once", "2 at once")]


def test_record_round_trips(tmp_path: Path) -> None:
    """Guards against a record that its own schema cannot read back, and an unknown key that passes."""
    record = record_of(tmp_path)
    line = (tmp_path / "record.jsonl").read_text(encoding="utf-8")
    assert line.count("\n") == 1
    assert RunRecord.model_validate_json(line) == record
    assert record.provenance.versions["python"]
    assert record.provenance.machine["cpus"]
    with pytest.raises(ValueError, match="Extra inputs"):
        RunRecord.model_validate_json(line.replace('"finished"', '"more":1,"finished"', 1))


def test_notes_say_what_was_cut(tmp_path: Path) -> None:
    """Guards against a short run that looks like a whole one."""
    notes = " ".join(record_of(tmp_path, max_new_tokens=10).notes)
    assert "4 of its 5 prompts" in notes
    assert "answers were cut at 10 tokens" in notes


def test_percentiles() -> None:
    """Guards against a p95 that is the maximum."""
    found = spread([float(value) for value in range(101)])
    assert found is not None
    assert (found.low, found.median, found.high) == (5.0, 50.0, 95.0)
    assert spread([None]) is None


def answered(prompt: str, seconds: float) -> RequestPart:
    return RequestPart(prompt_id=prompt, turn=0, text="a", num_tokens=11, total_seconds=seconds, decode_seconds=seconds)


def batch(
    form: str,
    requests: Sequence[RequestPart],
    *,
    repeat: int = 0,
    load: LoadPart | None = None,
    wall: float = 1.0,
    complete: bool = True,
    counters: RoundsPart | None = None,
) -> BatchPart:
    return BatchPart(
        data_set="s",
        load=load or LoadPart(),
        repeat=repeat,
        form=form,
        prompt_ids=[request.prompt_id for request in requests],
        wall_seconds=wall,
        complete=complete,
        counters=counters,
        requests=list(requests),
    )
