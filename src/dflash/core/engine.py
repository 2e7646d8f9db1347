"""Requests on a target and its draft, whatever library computes them: prompts in, text and figures out, round by round.

Holds shared weights and no state of any request: every generation makes its own sessions and frees them, so
requests on one engine may follow or interleave one another without a trace. Decoding itself is `core/loop.py`; a
backend adds its acceptor and the loading of models.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from dflash import arguments
from dflash.core.adaptive import AdaptiveDrafter
from dflash.core.bigrams import Bigrams
from dflash.core.drafting import ClosableDrafter, CopyDrafter, SharedDrafter, make_session
from dflash.core.engine_info import EngineInfo
from dflash.core.loop import speculative_rounds
from dflash.core.memory import Memory
from dflash.core.parking import ParkingDrafter
from dflash.core.protocols import Acceptor, Target
from dflash.core.requests import Prompt, check_request, encodable, messages_of, token_ids_of
from dflash.core.stopping import StopRule
from dflash.core.text import IncrementalText
from dflash.errors import ConfigError, PromptError
from dflash.types import Clock, Drafting, Result, Round, SamplingParams, Stats

if TYPE_CHECKING:
    from dflash.core.calibration import Device

logger = logging.getLogger(__name__)

NO_TREES = "chains in mode fast, too: a layer state of this target, or its use of positions, holds no branches"

_DEFAULT_PARAMS = SamplingParams()
CHECKED_ROWS = 16
"""Rows of the widest verify forward where a backend does not say how far it has checked."""


@dataclass(frozen=True)
class StreamEvent:
    """One round of a generation, as far as it is certain."""

    text: str
    """Newly certain text; often empty, never taken back. The pieces of all events are the whole text."""
    token_ids: tuple[int, ...]
    """Tokens of this round, a stop token included."""
    round: Round
    stats: Stats
    """Figures so far: one object that all events of a generation share."""


class TargetSession(Target, Protocol):
    """A target's session as an engine holds it."""

    @property
    def num_tokens(self) -> int:
        """Committed tokens = position of the anchor."""
        ...

    def return_at_least(self, num_keys: int) -> None:
        """Let exact forwards attend over at least `num_keys` keys, as they will late in a long text."""
        ...

    def close(self) -> None:
        """Free the state."""
        ...


class SharedTarget(Protocol):
    """The weights side of a target: what sessions are made from."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def max_length(self) -> int:
        """Context limit in tokens."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of a tap."""
        ...

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    @property
    def taps(self) -> Sequence[int]:
        """Layers whose outputs are the features."""
        ...

    @property
    def model_name(self) -> str:
        """The library's name of the model's class, for people."""
        ...

    @property
    def layer_kinds(self) -> Sequence[str]:
        """Kind of each layer's state, in layer order, by the library's names."""
        ...

    @property
    def widest_window(self) -> int | None:
        """Tokens of the widest attention window; None if all layers see everything."""
        ...

    def with_taps(self, taps: Sequence[int], *, exact_width: int | None = None) -> Self:
        """Another target over the same weights that records these layers; `exact_width`: least number of rows of its
        exact forwards (None = as here). To be closed before this one."""
        ...

    def session(self, *, exact: bool = True, features: bool = True) -> TargetSession:
        """A fresh session; `exact`: in the width class of the probe, `features`: record the taps."""
        ...

    def close(self) -> None:
        """Leave the model as it was found."""
        ...


class Engine(ABC):
    """A target, its draft and its tokenizer, ready for any number of requests."""

    backend: ClassVar[str]
    """Its name in `registry.BACKENDS`."""

    def __init__(
        self,
        *,
        target: SharedTarget,
        drafter: SharedDrafter | None,
        tokenizer: Any,
        eos_ids: frozenset[int],
        info: EngineInfo,
        drafting: Drafting | None = None,
        memory: Memory | None = None,
        max_rows: int = CHECKED_ROWS,
        bigrams: Bigrams | None = None,
    ) -> None:
        """
        Args:
            drafting: how requests draft unless they say otherwise.
            memory: measured costs to start from; None = nothing is measured, rounds will tell.
            max_rows: most rows of a verify forward that has been checked (bit-exactness, memory).
            bigrams: counted beside the draft; None = there are no counts.
        """
        self.drafting = drafting or Drafting(width=info.width)
        self.memory = memory or Memory()
        self.max_rows = max_rows
        self.bigrams = bigrams
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.info = info

    @abstractmethod
    def acceptor(self, params: SamplingParams, prompt_ids: Sequence[int]) -> Acceptor:
        """The acceptance rule of one request, over logits of this backend. Raises ConfigError for unusable params."""

    @abstractmethod
    def as_numpy(self, logits: Any) -> NDArray[np.float32]:
        """Logits or features of this backend in the host's memory; float32 holds every narrower number exactly."""

    @abstractmethod
    def device(self) -> Device:
        """What costs depend on here besides `info`, and how to wait until all work is done."""

    def profiling_clock(self) -> Clock:
        """Seconds, read when the device has done all it was given; here for devices that never lag behind the host."""
        return time.perf_counter

    def tokenize(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt: through the tokenizer's chat template, or as plain text (`raw`, strings only).

        Raises PromptError if the tokenizer has no template, the template refuses the messages or there is no text.
        """
        if raw:
            if not isinstance(prompt, str):
                raise PromptError("raw prompts are plain text; messages need the chat template (raw=False).")
            ids: list[int] = self.tokenizer(encodable(prompt))["input_ids"]
            return ids
        messages = messages_of(prompt)
        if not self.tokenizer.chat_template:
            raise PromptError(
                f"the tokenizer of '{self.info.target}' has no chat template; give the prompt as plain text "
                "with raw=True (--raw), or choose an instruction-tuned target."
            )
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise PromptError(f"the chat template refuses these messages ({error}); correct their roles.") from error
        ids = self.tokenizer(encodable(text), add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out. Raises ConfigError for what are no ids of this target."""
        arguments.check_token_ids("token_ids", token_ids, self.target.vocab_size)
        return self._text_of([int(token) for token in token_ids])

    def _text_of(self, token_ids: Sequence[int]) -> str:
        """`decode` without its checks: for the engine's own ids, in every round."""
        ids = list(token_ids)
        text: str | list[str] = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def generate(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams = _DEFAULT_PARAMS,
        *,
        prompt_ids: Sequence[int] | None = None,
        use_draft: bool = True,
        exact: bool | None = None,
        raw: bool = False,
        drafting: Drafting | None = None,
    ) -> Result:
        """Answer a prompt (or `prompt_ids`); arguments and errors as `stream`."""
        events = self.stream(
            prompt, params, prompt_ids=prompt_ids, use_draft=use_draft, exact=exact, raw=raw, drafting=drafting
        )
        pieces: list[str] = []
        token_ids: list[int] = []
        stats = Stats()
        with closing(events):
            for event in events:
                pieces.append(event.text)
                token_ids.extend(event.token_ids)
                stats = event.stats
        return Result(text="".join(pieces), token_ids=token_ids, stats=stats)

    def stream(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams = _DEFAULT_PARAMS,
        *,
        prompt_ids: Sequence[int] | None = None,
        use_draft: bool = True,
        exact: bool | None = None,
        raw: bool = False,
        drafting: Drafting | None = None,
        profile: bool = False,
    ) -> Generator[StreamEvent, None, None]:
        """Answer a prompt round by round; only committed tokens appear. Closing it early cancels the request.

        Args:
            prompt: a user message or a conversation; with `raw` plain text to be continued.
            prompt_ids: token ids in place of `prompt`.
            use_draft: False = plain decoding by the same loop.
            exact: decode in the width class of the probe; None = as loaded. False is the fastest plain form.
            drafting: how to draft; None = as loaded. It changes speed, in mode "exact" never a bit.
            profile: wait for the device at every reading of the clock, so that each part of a round gets its own time.
                Changes nothing on a CPU; on a GPU it costs a little speed, and without it the wait for a forward counts
                where its result is first read.

        Raises (at once, before the first round):
            PromptError: empty, too long or with ids outside the vocabulary.
            ConfigError: exact=True on an engine that was loaded with exact=False, or unusable arguments.
        """
        vocab_size = self.target.vocab_size
        check_request(
            params, drafting, use_draft=use_draft, exact=exact, raw=raw, profile=profile, vocab_size=vocab_size
        )
        ids = self._prompt_ids(prompt, prompt_ids, raw)
        shared = self.drafter if use_draft else None
        chosen = drafting or self.drafting
        with ExitStack() as opened:
            has_model = shared is not None and not isinstance(shared, CopyDrafter)
            session = self.target.session(exact=self._exact(exact), features=has_model)
            opened.callback(session.close)
            drafter = self._drafter(shared, session, chosen, params)
            rounds = speculative_rounds(
                session,
                drafter,
                self.acceptor(params, ids),
                StopRule.for_request(params, self.eos_ids, self._text_of),
                ids,
                max_new_tokens=params.max_new_tokens,
                width=chosen.width,
                clock=self.profiling_clock() if profile else time.perf_counter,
            )
            stats = Stats(num_prompt_tokens=len(ids))
            if drafter is not None and chosen.mode == "fast" and not (chosen.fixed or session.supports_trees):
                stats.notes.append(NO_TREES)
            text = IncrementalText(self._text_of, params.stop)
            return self._events(rounds, opened.pop_all().close, text, stats, drafter)

    def close(self) -> None:
        """Take what the engine put on its models off again; the engine cannot be used any more."""
        with closing(self.target):
            if isinstance(self.drafter, ClosableDrafter):
                self.drafter.close()

    def _drafter(
        self, shared: SharedDrafter | None, session: TargetSession, drafting: Drafting, params: SamplingParams
    ) -> AdaptiveDrafter | ParkingDrafter | None:
        """The drafter of one request; None without a draft."""
        if shared is None:
            return None
        return make_session(
            shared,
            drafting,
            self.memory,
            max_rows=self.max_rows,
            supports_trees=session.supports_trees,
            bigrams=self.bigrams,
            params=params,
        )

    def _events(
        self,
        rounds: Generator[Round, None, None],
        free: Callable[[], None],
        text: IncrementalText,
        stats: Stats,
        drafter: AdaptiveDrafter | ParkingDrafter | None,
    ) -> Generator[StreamEvent, None, None]:
        try:
            for step in rounds:
                started = time.perf_counter()
                piece = text.push(step.tokens)
                if step.finish_reason is not None:
                    piece += text.finish()
                # Turning tokens into text is part of what a round costs.
                step = dataclasses.replace(step, total_seconds=step.total_seconds + time.perf_counter() - started)
                _count(stats, step)
                if drafter is not None and stats.drafting_stopped is None and drafter.reason is not None:
                    stats.drafting_stopped = drafter.reason
                    logger.warning("%s. `dflash check` looks for the reason.", drafter.reason)
                if drafter is not None and step.finish_reason is not None:
                    stats.notes += drafter.notes
                yield StreamEvent(piece, step.tokens, step, stats)
        finally:
            rounds.close()
            free()
            if stats.finish_reason is None:
                stats.finish_reason = "cancelled"

    def _prompt_ids(self, prompt: Prompt | None, prompt_ids: Sequence[int] | None, raw: bool) -> list[int]:
        if (prompt is None) == (prompt_ids is None):
            raise PromptError("give either a prompt or prompt_ids.")
        given = self.tokenize(prompt, raw=raw) if prompt is not None else prompt_ids
        return token_ids_of(given, self.target.vocab_size, self.info.target)

    def _exact(self, exact: bool | None) -> bool:
        if exact and self.info.exactness is None:
            raise ConfigError("this engine was loaded with exact=False; load it with exact=True for exact decoding.")
        return self.info.exact if exact is None else exact and self.info.exact


def _count(stats: Stats, step: Round) -> None:
    """Add a round; the first one is the prefill, which is no decoding round but gives the first token."""
    if stats.num_tokens:
        stats.add(step)
        return
    stats.prefill_seconds = step.total_seconds
    stats.num_tokens = len(step.tokens)
    stats.finish_reason = step.finish_reason
