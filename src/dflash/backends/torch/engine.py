"""The PyTorch engine: `load` opens a target and its draft once, `Engine` answers requests with them.

Holds shared weights and no state of any request: every generation makes its own sessions and frees them, so
requests on one engine may follow or interleave one another without a trace. Decoding itself is `core/loop.py`,
loading is `loading.py`; this file only puts the parts together.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash.backends.torch.draft_model import DraftModel, load_draft
from dflash.backends.torch.drafters.dflash import DFlashDrafter
from dflash.backends.torch.exactness import WidthClass, probe
from dflash.backends.torch.loading import (
    check_pair,
    choose_device,
    choose_dtype,
    end_of_sequence_ids,
    load_target,
    set_threads,
)
from dflash.backends.torch.packing import pack_linears
from dflash.backends.torch.sampling import TorchAcceptor
from dflash.backends.torch.target import TorchTarget
from dflash.cache import file_sha256
from dflash.core.draft_config import WEIGHTS_FILE, DraftConfig, read_draft_config
from dflash.core.loop import speculative_rounds
from dflash.core.parking import ParkingDrafter
from dflash.core.stopping import StopRule
from dflash.core.text import IncrementalText
from dflash.errors import ConfigError, PromptError
from dflash.registry import DRAFTERS, load_attribute
from dflash.resolve import AUTO, Progress, Source, resolve_draft, resolve_target
from dflash.types import Result, Round, SamplingParams, Stats

logger = logging.getLogger(__name__)

Prompt = str | Sequence[Mapping[str, str]]
"""One user message, or a conversation of {"role": ..., "content": ...} messages."""

_DEFAULT_PARAMS = SamplingParams()
_PROBED_WIDTH = 16
"""Rows of the widest forward that the load-time probe covers; a wider block is probed at its own width."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What an engine runs, resolved: printed by the command line and kept in every record."""

    target: str
    """As named by the user."""
    target_revision: str | None
    """Commit of a hub repository."""
    draft: str | None
    """None: plain decoding only."""
    draft_revision: str | None
    draft_sha256: str | None
    """Of the draft's weights file."""
    block_size: int | None
    """Slots of the draft's block, anchor included."""
    width: int | None
    """Most rows of a verify forward, where it was limited."""
    dtype: str
    """Of weights and activations, e.g. "bfloat16"."""
    device: str
    num_threads: int
    exactness: WidthClass | None
    """What the load-time probe found; None if it was not asked for (exact=False)."""

    @property
    def exact(self) -> bool:
        """Whether plain and speculative decoding give the same bits here (False: not probed, or not possible)."""
        return self.exactness is not None and self.exactness.holds


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


def load(
    target: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None = AUTO,
    *,
    dtype: str | None = None,
    device: str | None = None,
    num_threads: int | None = None,
    exact: bool = True,
    trust_remote_code: bool = False,
    width: int | None = None,
    progress: Progress | None = None,
) -> Engine:
    """Open a target and a draft for generation.

    Args:
        target: hub id, local folder, GGUF file or built-in name.
        draft: the same (no GGUF); "auto" = the draft shipped for this target, None = plain decoding only.
        dtype: "float32", "bfloat16" or "float16"; None = bfloat16 where the device computes in it, else float32.
        device: "cpu", "cuda", "cuda:1" ...; None = a CUDA device if there is one.
        num_threads: CPU threads of PyTorch, process-wide; None = the physical cores this process may use, but not
            more than PyTorch is already limited to (OMP_NUM_THREADS).
        exact: probe for the width class in which plain and speculative decoding give the same bits, and decode in it.
        trust_remote_code: run Python code that comes with the target.
        width: most rows of a verify forward (anchor and width - 1 draft tokens); None = the draft's block.
        progress: told what is being done and how much of it is finished; without it, steps are logged.

    Raises:
        ModelError, MissingExtra, ConfigError: with the cure in the message; nothing stays loaded.
    """
    if width is not None and width < 1:
        raise ConfigError(f"width must be at least 1 (the anchor's row), not {width}.")
    report = progress or _log_steps()
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    set_threads(num_threads)
    target_source = resolve_target(os.fspath(target), allow_code=trust_remote_code, progress=report)
    draft_source = None if draft is None else resolve_draft(os.fspath(draft), target_source, progress=report)
    # The draft's description is read first: a wrong one should not cost the loading of the target.
    config = None if draft_source is None else read_draft_config(draft_source.path)
    loaded = load_target(
        target_source,
        dtype=chosen_dtype,
        device=chosen_device,
        trust_remote_code=trust_remote_code,
        progress=report,
    )
    if draft_source is not None and config is not None:
        check_pair(config, loaded.model, draft_name=draft_source.name, target_name=target_source.name)
    # Likewise the draft's weights before the probe.
    network = None if draft_source is None else _load_network(draft_source, loaded.model, report)
    report("packing weights", None)
    pack_linears(loaded.model)
    exactness = _probe(loaded.model, config.block_size if config else 1, report) if exact else None
    shared = TorchTarget(
        loaded.model,
        taps=config.target_layer_ids if config else (),
        exact_width=exactness.width if exactness else 1,
    )
    drafter = None if network is None else load_attribute(DRAFTERS["dflash"])(network, shared)
    return Engine(
        target=shared,
        drafter=drafter,
        tokenizer=loaded.tokenizer,
        eos_ids=end_of_sequence_ids(loaded),
        info=_info(target_source, draft_source, config, shared, exactness, width),
    )


class Engine:
    """A target, its draft and its tokenizer, ready for any number of requests."""

    def __init__(
        self,
        *,
        target: TorchTarget,
        drafter: DFlashDrafter | None,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: frozenset[int],
        info: EngineInfo,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.info = info

    def tokenize(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt: through the tokenizer's chat template, or as plain text (`raw`, strings only).

        Raises PromptError if the tokenizer has no template, the template refuses the messages or there is no text.
        """
        if raw:
            if not isinstance(prompt, str):
                raise PromptError("raw prompts are plain text; messages need the chat template (raw=False).")
            ids: list[int] = self.tokenizer(prompt)["input_ids"]
            return ids
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if not messages or any(not isinstance(m.get(key), str) for m in messages for key in ("role", "content")):
            raise PromptError('a conversation is a non-empty list of {"role": ..., "content": ...} with texts.')
        if not self.tokenizer.chat_template:
            raise PromptError(
                f"the tokenizer of '{self.info.target}' has no chat template; give the prompt as plain text "
                "with raw=True (--raw), or choose an instruction-tuned target."
            )
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise PromptError(f"the chat template refuses these messages ({error}); correct their roles.") from error
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        text: str | list[str] = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
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
    ) -> Result:
        """Answer a prompt (or `prompt_ids`); arguments and errors as `stream`."""
        events = self.stream(prompt, params, prompt_ids=prompt_ids, use_draft=use_draft, exact=exact, raw=raw)
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
    ) -> Generator[StreamEvent, None, None]:
        """Answer a prompt round by round; only committed tokens appear. Closing it early cancels the request.

        Args:
            prompt: a user message or a conversation; with `raw` plain text to be continued.
            prompt_ids: token ids in place of `prompt`.
            use_draft: False = plain decoding by the same loop.
            exact: decode in the width class of the probe; None = as loaded. False is the fastest plain form.

        Raises (at once, before the first round):
            PromptError: empty, too long or with ids outside the vocabulary.
            ConfigError: exact=True on an engine that was loaded with exact=False, or unusable parameters.
        """
        ids = self._prompt_ids(prompt, prompt_ids, raw)
        drafter = ParkingDrafter(self.drafter.session()) if self.drafter is not None and use_draft else None
        session = self.target.session(exact=self._exact(exact), features=drafter is not None)
        rounds = speculative_rounds(
            session,
            drafter,
            TorchAcceptor(params, ids, self.target.vocab_size, self.target.device),
            StopRule.for_request(params, self.eos_ids, self.decode),
            ids,
            max_new_tokens=params.max_new_tokens,
            width=self.info.width,
        )
        stats = Stats(num_prompt_tokens=len(ids))
        return self._events(rounds, session.close, IncrementalText(self.decode, params.stop), stats, drafter)

    def close(self) -> None:
        """Take the engine's hooks off the target model; the engine cannot be used any more."""
        self.target.close()

    def _events(
        self,
        rounds: Generator[Round, None, None],
        free: Callable[[], None],
        text: IncrementalText,
        stats: Stats,
        drafter: ParkingDrafter | None,
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
                    logger.warning("%s.", drafter.reason)
                yield StreamEvent(piece, step.tokens, step, stats)
        finally:
            rounds.close()
            free()
            if stats.finish_reason is None:
                stats.finish_reason = "cancelled"

    def _prompt_ids(self, prompt: Prompt | None, prompt_ids: Sequence[int] | None, raw: bool) -> list[int]:
        if (prompt is None) == (prompt_ids is None):
            raise PromptError("give either a prompt or prompt_ids.")
        if prompt is not None:
            prompt_ids = self.tokenize(prompt, raw=raw)
        ids = [int(token) for token in prompt_ids or ()]
        if wrong := [token for token in ids if not 0 <= token < self.target.vocab_size]:
            raise PromptError(
                f"token id {wrong[0]} lies outside the vocabulary of '{self.info.target}' "
                f"({self.target.vocab_size} tokens); use ids of its own tokenizer."
            )
        return ids

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


def _probe(model: Any, block_size: int, report: Progress) -> WidthClass:
    report("checking bit-exactness", None)
    # The same widths with and without a draft, so that both settle on the same class. A block wider than that either
    # belongs to the class too, or makes the probe say that bit-exactness does not hold.
    found = probe(model, max_width=max(_PROBED_WIDTH, block_size), block_size=block_size)
    if not found.holds:
        logger.warning(
            "bit-exact decoding is not possible here: %s Near-ties may differ from plain decoding.", found.reason
        )
    return found


def _load_network(source: Source, model: PreTrainedModel, report: Progress) -> DraftModel:
    report(f"loading draft {source.name}", None)
    # float16 overflows in the feature fusion of real targets; the drafter casts at its border.
    dtype = torch.float32 if model.dtype == torch.float16 else model.dtype
    return load_draft(source.path, model.device, dtype)


def _info(
    target: Source,
    draft: Source | None,
    config: DraftConfig | None,
    shared: TorchTarget,
    exactness: WidthClass | None,
    width: int | None,
) -> EngineInfo:
    return EngineInfo(
        target=target.name,
        target_revision=target.revision,
        draft=draft.name if draft else None,
        draft_revision=draft.revision if draft else None,
        draft_sha256=file_sha256(draft.path / WEIGHTS_FILE) if draft else None,
        block_size=config.block_size if config else None,
        width=width,
        dtype=str(shared.dtype).removeprefix("torch."),
        device=str(shared.device),
        num_threads=torch.get_num_threads(),
        exactness=exactness,
    )


def _log_steps() -> Progress:
    """A progress that logs each step once."""
    said = ""

    def report(what: str, done: float | None) -> None:
        nonlocal said
        if what != said:
            said = what
            logger.info("%s", what)

    return report
