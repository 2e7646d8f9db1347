"""Asks a backend everything that a plan holds and keeps every answer, failure and interruption.

Knows order, time and failures; knows neither models nor figures. A failed request is counted under its kind and the run
goes on, until the engine is known to be gone; then, as after Ctrl-C, the run ends early with all that was measured.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dflash.bench.crowd import Waiting, ask_many
from dflash.bench.journal import Journal
from dflash.bench.protocol import (
    GONE,
    Answer,
    Backend,
    Cancelled,
    Form,
    Request,
    RequestFailed,
    Rounds,
)
from dflash.bench.record import BatchPart, RequestPart, RoundsPart, SharePart
from dflash.bench.workload import Batch, Workload, chosen_forms, plan, remaining
from dflash.core.textshare import text_share
from dflash.errors import ConfigError
from dflash.prepare.prompts import Conversation

MAX_GONE_IN_A_ROW = 3
"""So many timeouts or broken connections without a success between them end the run."""

Tick = Callable[[str, int], object]
"""Told what was just asked and how many requests that were."""


@dataclass
class Outcome:
    """What a run brought."""

    batches: list[BatchPart]
    stopped_by: str | None = None
    """None: everything was asked."""
    interrupted: bool = False
    """Stopped by the user."""


@dataclass
class _Health:
    """Whether the engine still answers; shared by the threads of a batch."""

    in_a_row: int = 0
    gone: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, failure: RequestFailed | None) -> None:
        with self.lock:
            if failure is None or failure.kind not in GONE:
                self.in_a_row = 0
                return
            self.in_a_row += 1
            if failure.fatal:
                self.gone = str(failure)
            elif self.in_a_row >= MAX_GONE_IN_A_ROW:
                self.gone = f"{self.in_a_row} requests in a row got no answer; the last one: {failure}"


class Runner:
    """One run of a workload on a backend."""

    def __init__(
        self,
        backend: Backend,
        workload: Workload,
        journal: Journal,
        *,
        forms: Sequence[Form] | None = None,
        clock: Waiting | None = None,
    ) -> None:
        self._backend = backend
        self._workload = workload
        self._journal = journal
        self._clock = clock or Waiting()
        chosen = chosen_forms(backend.forms, ()) if forms is None else forms
        self._forms: dict[str, Form] = {form.name: form for form in chosen}
        self._health = _Health()
        self._cancelled = threading.Event()
        self._first_answers: dict[tuple[str, str, int], str] = {}
        for load in workload.loads:
            if not load.sequential and backend.max_concurrency == 1:
                raise ConfigError("this backend takes one request at a time; leave --concurrency and --rate out.")
            if (load.concurrency or 1) > backend.max_concurrency:
                raise ConfigError(f"--concurrency {load.concurrency} is more than {backend.max_concurrency}; lower it.")

    def warm_up(self) -> None:
        """One short answer per form, thrown away: first requests allocate, compile and fill caches.

        Raises RequestFailed: whoever cannot answer this need not be measured.
        """
        if not self._workload.warm_up_tokens:
            return
        first = self._workload.questions[0].conversations[0]
        sampling = dataclasses.replace(self._workload.sampling, max_new_tokens=self._workload.warm_up_tokens)
        for form in self._forms:
            self._backend.generate(Request(messages=tuple(first.opening()), sampling=sampling), form)

    def run(self, done: Iterable[BatchPart] = (), tick: Tick = lambda what, number: None) -> Outcome:
        """Ask all that is not among `done`. Never raises for failed requests, Ctrl-C or an engine that is gone."""
        batches = {earlier.key: earlier for earlier in done}
        for earlier in batches.values():
            self._remember(earlier)
        outcome = Outcome([])
        started = self._clock.now()
        for batch in remaining(plan(self._workload, list(self._forms.values())), list(batches.values())):
            try:
                part = self._ask(batch, outcome, tick)
                if part is not None:
                    batches[part.key] = part
                    self._journal.add(part)
                    self._remember(part)
            except KeyboardInterrupt:  # between two requests
                outcome.interrupted = True
            if outcome.interrupted:
                outcome.stopped_by = "stopped by the user (Ctrl-C)"
                break
            if self._health.gone is not None:
                outcome.stopped_by = f"the engine does not answer any more: {self._health.gone}"
                break
        self._journal.end_sitting(self._clock.now() - started)
        outcome.batches = list(batches.values())
        return outcome

    def _ask(self, batch: Batch, outcome: Outcome, tick: Tick) -> BatchPart | None:
        """Ask one batch; None if not even one request of it came to an end."""
        requests: list[RequestPart] = []
        before = self._counters(batch.form)
        self._backend.start_memory()
        started = self._clock.now()

        def converse(conversation: Conversation) -> None:
            for part in self._converse(conversation, batch):
                requests.append(part)  # list.append is atomic, and the order is that of completion
                tick(f"{batch.data_set}: {conversation.id} ({batch.form})", 1)

        try:
            if self._backend.max_concurrency == 1:
                for conversation in batch.conversations:
                    converse(conversation)
            else:
                ask_many(batch.conversations, batch.load, converse, self._clock, self._cancelled)
        except KeyboardInterrupt:
            self._cancelled.set()
            outcome.interrupted = True
        wall = self._clock.now() - started
        if not requests:
            return None
        after = None if before is None else self._counters(batch.form)
        return BatchPart(
            data_set=batch.data_set,
            load=batch.load,
            repeat=batch.repeat,
            form=batch.form,
            prompt_ids=[one.id for one in batch.conversations],
            wall_seconds=wall,
            complete=len(requests) == batch.num_requests and not outcome.interrupted,
            counters=None if before is None or after is None else difference(after, before),
            peak_memory_bytes=self._backend.peak_memory_bytes(),
            requests=list(requests),
        )

    def _converse(self, conversation: Conversation, batch: Batch) -> Iterable[RequestPart]:
        """Ask the turns one after the other. The assistant's earlier turns are what the target answered first in this
        run, in whatever form that was (the plain ones come first): so every form is asked the same."""
        messages = conversation.opening()
        for turn in range(len(conversation.turns)):
            if turn:
                earlier = self._first_answers.get((batch.data_set, conversation.id, turn - 1))
                if earlier is None:
                    yield RequestPart(
                        prompt_id=conversation.id,
                        turn=turn,
                        failure="refused",
                        message="not asked, because the turn before it has no answer",
                    )
                    continue
                messages += [
                    {"role": "assistant", "content": earlier},
                    {"role": "user", "content": conversation.turns[turn]},
                ]
            request = Request(messages=tuple(messages), sampling=self._workload.sampling, cancelled=self._cancelled)
            try:
                answer = self._backend.generate(request, batch.form)
            except Cancelled:
                return
            except RequestFailed as failure:
                self._health.note(failure)
                yield RequestPart(prompt_id=conversation.id, turn=turn, failure=failure.kind, message=str(failure))
                if self._health.gone is not None:
                    self._cancelled.set()
                    return
                continue
            self._health.note(None)
            self._first_answers.setdefault((batch.data_set, conversation.id, turn), answer.text)
            yield request_part(answer, conversation.id, turn, _share(answer, request))

    def _remember(self, part: BatchPart) -> None:
        for request in part.requests:
            if request.failure is None:
                self._first_answers.setdefault((part.data_set, *request.key), request.text)

    def _counters(self, form: str) -> Rounds | None:
        try:
            return self._backend.counters(form)
        except RequestFailed:
            return None  # the requests themselves will tell whether anybody is there


def request_part(answer: Answer, prompt_id: str, turn: int, share: SharePart | None = None) -> RequestPart:
    """An answer as it goes into the record."""
    return RequestPart(
        prompt_id=prompt_id,
        turn=turn,
        text=answer.text,
        token_ids=None if answer.token_ids is None else list(answer.token_ids),
        num_tokens=answer.num_tokens,
        num_prompt_tokens=answer.num_prompt_tokens,
        finish_reason=answer.finish_reason,
        total_seconds=answer.total_seconds,
        first_token_seconds=answer.first_token_seconds,
        decode_seconds=answer.decode_seconds,
        rounds=None if answer.rounds is None else rounds_part(answer.rounds),
        share=share,
        remark=answer.remark,
    )


def rounds_part(rounds: Rounds) -> RoundsPart:
    """A backend's rounds as they go into the record."""
    values = vars(rounds)  # not dataclasses.asdict, which takes a Counter apart wrongly
    return RoundsPart.model_validate({**values, "lengths": None if rounds.lengths is None else dict(rounds.lengths)})


def difference(after: Rounds, before: Rounds) -> RoundsPart:
    """What a server's running totals gained. Totals that went back (a restart) give what they are now."""
    if after.num_rounds < before.num_rounds:
        return rounds_part(after)
    slots = None
    if after.accepted_per_slot is not None and before.accepted_per_slot is not None:
        earlier = [*before.accepted_per_slot, *[0] * len(after.accepted_per_slot)]
        slots = [now - then for now, then in zip(after.accepted_per_slot, earlier, strict=False)]
    rounds = after.num_rounds - before.num_rounds

    def gained(now: int | None, then: int | None) -> int | None:
        return None if now is None or then is None else now - then

    return RoundsPart(
        num_rounds=rounds,
        num_tokens=after.num_tokens - before.num_tokens,
        num_proposed=gained(after.num_proposed, before.num_proposed),
        num_accepted=gained(after.num_accepted, before.num_accepted),
        proposed_per_slot=None if slots is None else [rounds] * len(slots),
        accepted_per_slot=slots,
    )


def _share(answer: Answer, request: Request) -> SharePart:
    """Loops and copies by token ids, or by words where no ids are told."""
    if answer.token_ids is not None and answer.prompt_ids is not None:
        share = text_share(answer.prompt_ids, answer.token_ids)
    else:
        numbers: dict[str, int] = {}

        def numbered(text: str) -> list[int]:
            return [numbers.setdefault(word, len(numbers)) for word in text.split()]

        share = text_share(numbered(" ".join(one["content"] for one in request.messages)), numbered(answer.text))
    return SharePart(
        unit="word" if answer.token_ids is None or answer.prompt_ids is None else "token",
        num=share.num_tokens,
        looping=share.num_looping,
        copied=share.num_copied,
        repeated=share.num_repeated,
    )
