"""Order, failures, interruption and resuming of a run: nothing measured is lost, nothing failed is hidden."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from dflash.bench.crowd import Waiting
from dflash.bench.journal import Journal
from dflash.bench.protocol import Cancelled, Request, RequestFailed, Rounds
from dflash.bench.record import BatchPart, LoadPart
from dflash.bench.run import RECORD_FILE, Finished, run_benchmark
from dflash.bench.runner import MAX_GONE_IN_A_ROW, Outcome, Runner, difference
from dflash.bench.workload import Workload, plan
from dflash.errors import ConfigError, DataError
from tests.bench.fakes import DRAFTED, EXACT, PLAIN, FakeBackend, echo, questions, workload


def runner(backend: FakeBackend, work: Workload, folder: Path) -> Runner:
    journal = Journal(folder / "batches.jsonl", work.fingerprint(list(backend.forms)))
    journal.start()
    return Runner(backend, work, journal)


def run(backend: FakeBackend, work: Workload, folder: Path, *, resume: bool = False) -> Finished:
    return run_benchmark("fake", backend, work, folder, command="dflash bench", resume=resume)


def counted(outcome: Outcome) -> Counter[str | None]:
    return Counter(request.failure for batch in outcome.batches for request in batch.requests)


def test_forms_alternate_prompt_by_prompt(tmp_path: Path) -> None:
    """Guards against all runs of one form in a row: a machine that slows down would decide the winner."""
    backend = FakeBackend()
    runner(backend, workload(questions(2), repeats=2), tmp_path).run()
    asked = [(form, request.messages[-1]["content"]) for form, request in backend.calls]
    names = ["plain", "plain-exact", "dflash"]
    assert asked == [(name, f"question {index}.0?") for index in range(2) for _ in range(2) for name in names]


def test_forms_alternate_batch_by_batch_under_load(tmp_path: Path) -> None:
    """Guards against a load that is measured in one form only, or all repeats of one form in a row."""
    backend = FakeBackend(max_concurrency=8)
    work = workload(questions(3), repeats=2, loads=[LoadPart(concurrency=2)])
    runner(backend, work, tmp_path).run()
    forms = [form for form, _ in backend.calls]
    assert forms == [name for _ in range(2) for name in ("plain", "plain-exact", "dflash") for _ in range(3)]


def test_at_most_so_many_at_once(tmp_path: Path) -> None:
    """Guards against a concurrency that is not reached, or exceeded."""
    now, most, lock, reached = [0], [0], threading.Lock(), threading.Event()

    def slow(request: Request, form: str, call: int) -> str:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] == 3:
                reached.set()
        reached.wait(60)  # the first ones wait for one another; a fourth would have the rest of the time to come
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return "a"

    backend = FakeBackend(say=slow, forms=(PLAIN,), max_concurrency=8)
    runner(backend, workload(questions(9), repeats=1, loads=[LoadPart(concurrency=3)]), tmp_path).run()
    assert most[0] == 3


def test_fixed_rate_does_not_wait_for_answers(tmp_path: Path) -> None:
    """Guards against an open loop that is closed: a slow server must not slow down the arrivals."""

    class Simulated(Waiting):
        """Time passes only where the runner waits for the next arrival."""

        seconds = 0.0

        def now(self) -> float:
            return self.seconds

        def sleep(self, seconds: float) -> None:
            self.seconds += seconds

    all_here = threading.Barrier(4)

    def slow(request: Request, form: str, call: int) -> str:
        all_here.wait(60)  # breaks where the fourth only comes after the first has been answered
        return "a"

    backend = FakeBackend(say=slow, forms=(PLAIN,), max_concurrency=8)
    work = workload(questions(4), repeats=1, loads=[LoadPart(concurrency=None, rate=20.0)])
    journal = Journal(tmp_path / "batches.jsonl", "f")
    outcome = Runner(backend, work, journal, clock=Simulated()).run()
    assert [request.text for request in outcome.batches[0].requests] == ["a"] * 4
    assert outcome.batches[0].wall_seconds == pytest.approx(3 * 0.05)


def test_second_turns_follow_the_plain_first_answer(tmp_path: Path) -> None:
    """Guards against forms that are asked different second questions because their first answers differ."""

    def say(request: Request, form: str, call: int) -> str:
        return f"answer of {form}"

    backend = FakeBackend(say=say)
    runner(backend, workload(questions(1, turns=2), repeats=1), tmp_path).run()
    second = [request.messages for _, request in backend.calls if len(request.messages) > 1]
    assert len(second) == 3
    for messages in second:
        assert [message["role"] for message in messages] == ["user", "assistant", "user"]
        assert messages[1]["content"] == "answer of plain"
        assert messages[2]["content"] == "question 0.1?"


def test_a_failed_request_is_counted_named_and_survived(tmp_path: Path) -> None:
    """Guards against failures that are dropped, end the run, or let a second turn be asked without a first answer."""

    def say(request: Request, form: str, call: int) -> str:
        if form == "dflash" and "question 1.0" in request.messages[-1]["content"]:
            raise RequestFailed("server error", "HTTP 500: out of luck")
        return echo(request, form, call)

    finished = run(FakeBackend(say=say), workload(questions(3), repeats=1), tmp_path)
    (cell,) = finished.record.cells
    by_form = {figures.form: figures for figures in cell.forms}
    assert by_form["dflash"].failures == {"server error": 1}
    assert (by_form["dflash"].num_done, by_form["plain"].num_done) == (2, 3)
    assert finished.record.finished
    assert any("out of luck" in note for note in finished.record.notes)
    speedup = by_form["dflash"].speedup
    assert speedup is not None
    assert speedup.num_prompts == 2


def test_a_second_turn_without_a_first_answer_is_named(tmp_path: Path) -> None:
    """Guards against a conversation that goes on without the answer it is about."""

    def say(request: Request, form: str, call: int) -> str:
        raise RequestFailed("rate limited", "HTTP 429")

    outcome = runner(FakeBackend(say=say, forms=(PLAIN,)), workload(questions(1, turns=2), repeats=1), tmp_path).run()
    assert counted(outcome) == {"rate limited": 1, "refused": 1}


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize(("fatal", "asked"), [(True, 1), (False, MAX_GONE_IN_A_ROW)])
def test_an_engine_that_is_gone_ends_the_run(concurrency: int, fatal: bool, asked: int, tmp_path: Path) -> None:
    """Guards against a thousand time limits waited for in a row after a server has died."""

    def say(request: Request, form: str, call: int) -> str:
        if call < 3:
            return echo(request, form, call)
        raise RequestFailed("connection", "nobody there", fatal=fatal)

    backend = FakeBackend(say=say, forms=(PLAIN,), max_concurrency=8)
    work = workload(questions(40), repeats=1, loads=[LoadPart(concurrency=concurrency)])
    finished = run(backend, work, tmp_path)
    assert not finished.record.finished
    assert "does not answer any more" in (finished.record.stopped_by or "")
    assert counted(finished.outcome)[None] == 3
    assert asked <= counted(finished.outcome)["connection"] < asked + concurrency
    assert len(backend.calls) < 12


def test_single_failures_do_not_end_the_run(tmp_path: Path) -> None:
    """Guards against three timeouts, spread over hours, that end a run."""

    def say(request: Request, form: str, call: int) -> str:
        if call % 3 == 2:
            raise RequestFailed("timeout", "slow")
        return "a"

    outcome = runner(FakeBackend(say=say, forms=(PLAIN,)), workload(questions(12), repeats=1), tmp_path).run()
    assert outcome.stopped_by is None
    assert counted(outcome) == {None: 8, "timeout": 4}


def pressed_at(call_of_ctrl_c: int) -> FakeBackend:
    def say(request: Request, form: str, call: int) -> str:
        if call == call_of_ctrl_c:
            raise KeyboardInterrupt
        return echo(request, form, call)

    return FakeBackend(say=say)


def test_ctrl_c_keeps_and_resuming_completes(tmp_path: Path) -> None:
    """Guards against a long run lost to one key, and against a resumed run that asks again what it has, or mixes."""
    first = run(pressed_at(7), workload(questions(4)), tmp_path)
    assert first.outcome.interrupted
    assert "Ctrl-C" in (first.record.stopped_by or "")
    assert counted(first.outcome) == {None: 7}
    assert (tmp_path / RECORD_FILE).exists()
    backend = FakeBackend()
    second = run(backend, workload(questions(4)), tmp_path, resume=True)
    assert second.record.finished
    assert len(backend.calls) == 4 * 2 * 3 - 7
    whole = run(FakeBackend(), workload(questions(4)), tmp_path / "whole")
    assert [cell.model_dump() for cell in second.record.cells] == [cell.model_dump() for cell in whole.record.cells]


def test_resuming_asks_failed_requests_again(tmp_path: Path) -> None:
    """Guards against a failure that stays for ever, and against one that is counted beside its later success."""

    def say(request: Request, form: str, call: int) -> str:
        if call == 2:
            raise RequestFailed("server error", "HTTP 503")
        return echo(request, form, call)

    first = run(FakeBackend(say=say), workload(questions(2), repeats=1), tmp_path)
    assert counted(first.outcome) == {None: 5, "server error": 1}
    again = FakeBackend()
    second = run(again, workload(questions(2), repeats=1), tmp_path, resume=True)
    assert counted(second.outcome) == {None: 6}
    assert len(again.calls) == 1


def test_ctrl_c_under_load_does_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    """Guards against a Ctrl-C that takes as long as the slowest request."""

    class PressingClock(Waiting):
        def sleep(self, seconds: float) -> None:
            raise KeyboardInterrupt

    def hang(request: Request, form: str, call: int) -> str:
        if call == 0:
            return "a"
        request.cancelled.wait(120)
        raise Cancelled("cancelled.")

    work = workload(questions(5), repeats=1, loads=[LoadPart(concurrency=None, rate=3.0)])
    backend = FakeBackend(say=hang, forms=(PLAIN,), max_concurrency=8)
    journal = Journal(tmp_path / "batches.jsonl", "f")
    started = time.perf_counter()
    outcome = Runner(backend, work, journal, clock=PressingClock()).run()
    assert time.perf_counter() - started < 60
    assert outcome.interrupted
    (batch,) = outcome.batches
    assert not batch.complete
    assert len(batch.requests) == 1


def test_a_journal_survives_a_crash_in_the_middle_of_a_line(tmp_path: Path) -> None:
    """Guards against a run that cannot be resumed because the machine died while it wrote."""
    work = workload(questions(2), repeats=1)
    run(FakeBackend(), work, tmp_path)
    path = tmp_path / "batches.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b"sitting") - 30])
    backend = FakeBackend()
    finished = run(backend, work, tmp_path, resume=True)
    assert len(backend.calls) == 1
    assert counted(finished.outcome) == {None: 6}
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_other_settings_cannot_be_resumed(tmp_path: Path) -> None:
    """Guards against figures of two different runs under one name."""
    run(FakeBackend(), workload(questions(2)), tmp_path)
    for other in (workload(questions(3)), workload(questions(2), temperature=0.5), workload(questions(2), repeats=3)):
        with pytest.raises(ConfigError, match="other questions, settings, forms or weights"):
            run(FakeBackend(), other, tmp_path, resume=True)
    other_weights = FakeBackend(draft_sha256="2" * 64)
    with pytest.raises(ConfigError, match="other questions, settings, forms or weights"):
        run(other_weights, workload(questions(2)), tmp_path, resume=True)
    with pytest.raises(ConfigError, match="exists already"):
        run(FakeBackend(), workload(questions(2)), tmp_path)
    with pytest.raises(DataError, match="Give the folder"):
        run(FakeBackend(), workload(questions(2)), tmp_path / "nowhere", resume=True)


def test_local_engines_refuse_load(tmp_path: Path) -> None:
    """Guards against --concurrency that a backend ignores."""
    with pytest.raises(ConfigError, match="one request at a time"):
        runner(FakeBackend(), workload(loads=[LoadPart(concurrency=2)]), tmp_path)


def test_counters_give_differences() -> None:
    """Guards against totals of other people's requests, and against negative figures after a restart."""
    before = Rounds(num_rounds=10, num_tokens=25, num_accepted=15, num_proposed=30, accepted_per_slot=[9, 6])
    after = Rounds(num_rounds=14, num_tokens=35, num_accepted=21, num_proposed=42, accepted_per_slot=[12, 8, 1])
    gained = difference(after, before)
    assert (gained.num_rounds, gained.num_tokens, gained.num_proposed, gained.num_accepted) == (4, 10, 12, 6)
    assert (gained.proposed_per_slot, gained.accepted_per_slot) == ([4, 4, 4], [3, 2, 1])
    assert gained.acceptance_length == 2.5
    assert difference(before, after).num_rounds == 10


def test_plan_is_complete() -> None:
    """Guards against a prompt that one form is never asked."""
    work = workload(questions(3), questions(2, name="other"), repeats=2, loads=[LoadPart(), LoadPart(concurrency=2)])
    batches = list(plan(work, [PLAIN, EXACT, DRAFTED]))
    asked = Counter((batch.data_set, batch.load.label, batch.form) for batch in batches for _ in batch.conversations)
    assert set(asked.values()) == {3 * 2, 2 * 2}
    assert len(asked) == 2 * 2 * 3
    assert len({batch.key for batch in batches}) == len(batches)


def test_batches_come_back_as_written(tmp_path: Path) -> None:
    """Guards against a journal that rounds or drops figures."""
    work = workload(questions(1), repeats=1)
    outcome = runner(FakeBackend(), work, tmp_path).run()
    read = Journal(tmp_path / "batches.jsonl", work.fingerprint([PLAIN, EXACT, DRAFTED])).resume()
    assert read == outcome.batches
    assert all(isinstance(batch, BatchPart) for batch in read)
