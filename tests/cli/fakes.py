"""An engine without models, and helpers that run the command line inside the test process.

The fake says prepared texts, one token per character, three accepted tokens per round with a draft and one
without, with fixed times: what the command line does with an engine can be checked to the letter.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dflash
from dflash.cli.main import main
from dflash.core.engine import StreamEvent
from dflash.core.engine_info import EngineInfo
from dflash.core.exactness import WidthClass
from dflash.errors import PromptError
from dflash.registry import load_attribute
from dflash.types import Result, Round, SamplingParams, Stats

Prompt = str | Sequence[Mapping[str, str]]
DRAFT_SECONDS, VERIFY_SECONDS, ROUND_SECONDS = 0.001, 0.008, 0.010
MARGIN = 0.25
"""Top-2 margin of the fake target, at every position."""


@dataclass
class FakeEngine:
    """Structurally an `Engine`, as far as the command line uses it."""

    answers: Sequence[str] = ("Hello, world.",)
    """Said in turn, round and round."""
    drafted: str | None = None
    """Said instead when a draft is used: an engine that is not lossless."""
    holds: bool = True
    exact_seconds: float = ROUND_SECONDS
    """Length of a round of plain decoding in its bit-exact form."""
    during: Callable[[int], None] = lambda index: None
    """Called before round `index`; may press Ctrl-C."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    max_rows: int = 16

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            target="fake",
            target_revision=None,
            draft="fake-draft",
            draft_revision=None,
            draft_sha256="0" * 64,
            block_size=4,
            width=None,
            dtype="float32",
            device="cpu",
            num_threads=1,
            exactness=WidthClass(self.holds, 4 if self.holds else 1, (4, 8), "measured by a fake."),
        )

    @property
    def target(self) -> Any:
        """A session whose two best logits are MARGIN apart."""
        verdict = SimpleNamespace(logits=torch.tensor([[0.0, 1.0, 1.0 + MARGIN]]))
        session = SimpleNamespace(prefill=lambda ids: verdict, close=lambda: None)
        return SimpleNamespace(session=lambda **kinds: session)

    def as_numpy(self, logits: torch.Tensor) -> Any:
        return logits.numpy()

    def tokenize(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        use_draft: bool = True,
        exact: bool | None = None,
        raw: bool = False,
        profile: bool = False,
    ) -> Generator[StreamEvent, None, None]:
        if "too long" in str(prompt):
            raise PromptError("the prompt is longer than the context; shorten it.")
        said = (
            self.drafted
            if use_draft and self.drafted is not None
            else self.answers[len(self.calls) % len(self.answers)]
        )
        call = {"prompt": prompt, "params": params, "use_draft": use_draft, "exact": exact, "raw": raw}
        self.calls.append({**call, "profile": profile})
        seconds = self.exact_seconds if not use_draft and exact is None else ROUND_SECONDS
        return self._events(said[: params.max_new_tokens], 3 if use_draft else 1, len(self.tokenize(prompt)), seconds)

    def generate(self, prompt: Prompt, params: SamplingParams, **options: Any) -> Result:
        with closing(self.stream(prompt, params, **options)) as stream:
            events = list(stream)
        token_ids = [token for event in events for token in event.token_ids]
        return Result("".join(event.text for event in events), token_ids, events[-1].stats)

    def _events(
        self, said: str, per_round: int, num_prompt_tokens: int, seconds: float
    ) -> Generator[StreamEvent, None, None]:
        stats = Stats(num_prompt_tokens=num_prompt_tokens, num_tokens=1, prefill_seconds=ROUND_SECONDS)
        pieces = [said[:1], *(said[at : at + per_round] for at in range(1, len(said), per_round))]
        for index, piece in enumerate(pieces):
            self.during(index)
            step = Round(
                tokens=tuple(map(ord, piece)),
                num_proposed=per_round if index and per_round > 1 else 0,
                num_accepted=len(piece) - 1,
                draft_seconds=DRAFT_SECONDS if index and per_round > 1 else 0.0,
                verify_seconds=VERIFY_SECONDS,
                total_seconds=seconds,
                finish_reason="length" if index == len(pieces) - 1 else None,
            )
            if index:
                stats.add(step)
            stats.finish_reason = step.finish_reason
            yield StreamEvent(piece, step.tokens, step, stats)


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


class CommandLine:
    """Runs `dflash ...` in this process; `fake` puts a fake engine in the place of `dflash.load`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, fake: bool = True
    ) -> None:
        self.engine = FakeEngine()
        self.loads: list[dict[str, Any]] = []
        self._monkeypatch, self._capsys = monkeypatch, capsys
        # However slow the machine is: what a command says does not depend on it.
        monkeypatch.setattr("dflash.cli.progress.LEAST_SECONDS", 1e6)
        if fake:
            monkeypatch.setattr(dflash, "load", self._load, raising=False)

    def _load(self, target: str, draft: str | None, **options: Any) -> FakeEngine:
        self.loads.append({"target": target, "draft": draft, **options})
        return self.engine

    def run(self, *words: str, stdin: str | bytes = "") -> Outcome:
        """Run `dflash WORDS`; everything it raises except `SystemExit` is a failure of the test."""
        data = stdin.encode() if isinstance(stdin, str) else stdin
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        self._capsys.readouterr()
        code = 0
        try:
            main(list(words))
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 0
        captured = self._capsys.readouterr()
        return Outcome(code, captured.out, captured.err)


def runs_once(patch: pytest.MonkeyPatch, place: str) -> None:
    """The function at `place` ("module.name") runs once; later calls get what it returned then. For a verb that shows
    one report in several forms: how it comes about is tested by the first."""
    original, found = load_attribute(":".join(place.rsplit(".", 1))), list[Any]()

    def remembered(*arguments: Any, **options: Any) -> Any:
        if not found:
            found.append(original(*arguments, **options))
        return found[0]

    patch.setattr(place, remembered)
