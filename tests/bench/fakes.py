"""A backend without models: prepared answers and fixed times, so that every figure can be checked to the letter.

Plain decoding takes 10 ms per token, its exact form 8 ms, the speculative form 12 ms per round of three tokens (4 ms of
drafting, 7 ms of verification). Time does not pass: the times are written into the answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dflash.bench.datasets.base import Questions
from dflash.bench.protocol import Answer, BackendInfo, Form, ModelInfo, Request, Rounds, Sampling
from dflash.bench.record import FormPart, LoadPart
from dflash.bench.workload import Workload
from dflash.prepare.prompts import Conversation

PLAIN = Form(name="plain", kind="plain", description="plain")
EXACT = Form(name="plain-exact", kind="plain", description="plain, padded")
DRAFTED = Form(name="dflash", kind="speculative", description="DFlash", reference="plain-exact")
PER_TOKEN = {"plain": 0.010, "plain-exact": 0.008, "dflash": 0.004}
FIRST_TOKEN = 0.020
ROUND_TOKENS = 3
NUM_TOKENS = 31

Say = Callable[[Request, str, int], str]
"""(request, form, number of the call) -> text; may raise."""


def echo(request: Request, form: str, call: int) -> str:
    """The same answer in every form: the question turned around, long enough for `NUM_TOKENS` characters."""
    return (request.messages[-1]["content"][::-1] * NUM_TOKENS)[:NUM_TOKENS]


@dataclass
class FakeBackend:
    """Structurally a `Backend`. A token is a character."""

    say: Say = echo
    forms: Sequence[Form] = (PLAIN, EXACT, DRAFTED)
    max_concurrency: int = 1
    same_seed_same_text: bool = True
    tells_times: bool = True
    draft_sha256: str = "1" * 64
    calls: list[tuple[str, Request]] = field(default_factory=list)
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def info(self) -> BackendInfo:
        return BackendInfo(
            engine="fake 1.0",
            target=ModelInfo(name="fake-target", sha256="0" * 64),
            draft=ModelInfo(name="fake-draft", sha256=self.draft_sha256),
            block_size=4,
            dtype="float32",
            device="cpu",
            num_threads=1,
            notes=("a fake",),
        )

    def generate(self, request: Request, form: str) -> Answer:
        with self.lock:
            number = len(self.calls)
            self.calls.append((form, request))
        text = self.say(request, form, number)[: request.sampling.max_new_tokens]
        decode = (len(text) - 1) * PER_TOKEN[form]
        return Answer(
            text=text,
            token_ids=tuple(map(ord, text)),
            prompt_ids=tuple(map(ord, request.messages[-1]["content"])),
            num_tokens=len(text),
            num_prompt_tokens=len(request.messages[-1]["content"]),
            total_seconds=FIRST_TOKEN + decode,
            first_token_seconds=FIRST_TOKEN if self.tells_times else None,
            decode_seconds=decode if self.tells_times else None,
            finish_reason="length" if len(text) == request.sampling.max_new_tokens else "stop",
            rounds=rounds(len(text) - 1) if form == DRAFTED.name else None,
        )

    def counters(self, form: str) -> Rounds | None:
        return None

    def start_memory(self) -> None:
        pass

    def peak_memory_bytes(self) -> int | None:
        return 123_000_000

    def close(self) -> None:
        self.closed = True


def rounds(num_tokens: int) -> Rounds:
    """Rounds of three tokens; the block has three draft slots, of which two are accepted."""
    number = num_tokens // ROUND_TOKENS
    return Rounds(
        num_rounds=number,
        num_tokens=number * ROUND_TOKENS,
        lengths={ROUND_TOKENS: number},
        num_proposed=3 * number,
        num_accepted=2 * number,
        proposed_per_slot=[number] * 3,
        accepted_per_slot=[number, number, 0],
        draft_seconds=0.004 * number,
        verify_seconds=0.007 * number,
        other_seconds=0.001 * number,
    )


def questions(number: int = 4, turns: int = 1, name: str = "fake-set") -> Questions:
    """Conversations with short prompts of their own."""
    rows = tuple(
        Conversation(
            id=f"p{index}", source="", context=(), turns=tuple(f"question {index}.{turn}?" for turn in range(turns))
        )
        for index in range(number)
    )
    return Questions(name=name, conversations=rows, origin="a test", licence="none", num_available=number + 1)


def workload(
    *sets: Questions, repeats: int = 2, loads: Sequence[LoadPart] = (LoadPart(),), **sampling: object
) -> Workload:
    values = {"max_new_tokens": NUM_TOKENS, **sampling}
    return Workload(
        questions=sets or (questions(),),
        sampling=Sampling(**values),  # type: ignore[arg-type]
        loads=tuple(loads),
        repeats=repeats,
        warm_up_tokens=0,
    )


def form_parts(forms: Sequence[Form]) -> list[FormPart]:
    return [
        FormPart(name=one.name, kind=one.kind, description=one.description, reference=one.reference) for one in forms
    ]
