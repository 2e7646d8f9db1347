"""`dflash prepare`: a file of prompts becomes a folder of the target's own answers.

Knows shards, resuming and the manifest. The output folder holds

    run.json              what the run was started with; a second run with anything else is refused
    answers-00000.jsonl   finished shards (answers.py has the row format), one per `shard_size` prompts in file order
    manifest.json         written last: its presence means that the set is complete

A shard appears under its name only when it is whole (temporary file, fsync, rename), so after a kill at any
moment the same command goes on with the first missing shard, and the result equals that of a run that was
never interrupted. Inside a shard prompts are answered in batches sorted by length, longest first: padding
stays small, and memory that does not suffice shows in the first batch.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from dflash.backends.torch.loading import (
    LoadedTarget,
    choose_device,
    choose_dtype,
    load_target,
    set_threads,
    spread_of,
)
from dflash.cache import file_sha256
from dflash.errors import ConfigError, DataError
from dflash.prepare.answers import (
    RUN_NAME,
    AnswerRow,
    Manifest,
    ShardRecord,
    read_manifest,
    write_manifest,
    write_shard,
)
from dflash.prepare.answers_folder import finished_shard, locked_folder, refuse_other_run
from dflash.prepare.jsonl import write_json_atomically
from dflash.prepare.prompts import Conversation, Message, read_prompts
from dflash.prepare.regenerate import Answerer
from dflash.resolve import resolve_target

DEFAULT_MAX_PROMPT_TOKENS = 1024
"""Longer prompts are left out: training sequences are short, and one long prompt pads its whole batch."""
LEAST_TEMPERATURE = 1e-4
"""Logits divided by less leave the range of float32."""

Item = TypeVar("Item")

TargetLoader = Callable[[str, str | None, str | None], LoadedTarget]
"""(target, dtype, device) -> the model on its device and its tokenizer."""


@dataclass(frozen=True, kw_only=True)
class PrepareProgress:
    """Where a run stands; handed to the progress callback at the start, after every batch and shard."""

    num_done: int
    """Answers that are settled (written, made, or left out), those of an earlier run included."""
    num_total: int
    """Answers of the whole run: one per user turn."""
    num_resumed: int
    """Answers that were settled when this process began."""
    num_new_tokens: int
    """Answer tokens made by this process."""
    seconds: float
    """Time since the target was loaded."""

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens per second of this process; 0 before the first batch."""
        return self.num_new_tokens / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimate from this process's own pace; None before the first batch."""
        here = self.num_done - self.num_resumed
        return self.seconds / here * (self.num_total - self.num_done) if here else None


@dataclass(frozen=True, kw_only=True)
class PrepareSummary:
    """What a finished run left behind."""

    out: Path
    num_answers: int
    num_skipped: int
    """Answers left out because their prompt was too long."""
    num_empty: int
    """Answers of the end token alone: kept, but nothing can be learned from them."""
    num_prompt_tokens: int
    num_answer_tokens: int
    num_shards: int
    num_resumed_shards: int
    """Shards that were there when this process began."""
    seconds: float
    """Time that this process spent on answers."""
    tokens_per_second: float
    """Answer tokens per second of this process; 0 if nothing was left to do."""


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Everything that decides the answers' bytes, besides prompts and weights; goes into run.json as it is."""

    target: str
    max_new_tokens: int
    temperature: float
    batch_size: int
    shard_size: int
    limit: int | None
    max_prompt_tokens: int
    system: str | None
    raw: bool
    seed: int

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size", "shard_size", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE}, not {self.temperature}."
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must lie in [0, 2^63), not {self.seed}.")


def prepare(
    prompts: Path,
    out: Path,
    target: str,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    batch_size: int = 64,
    shard_size: int = 512,
    limit: int | None = None,
    max_prompt_tokens: int = DEFAULT_MAX_PROMPT_TOKENS,
    system: str | None = None,
    raw: bool = False,
    seed: int = 0,
    dtype: str | None = None,
    device: str | None = None,
    progress: Callable[[PrepareProgress], None] | None = None,
    loader: TargetLoader | None = None,
) -> PrepareSummary:
    """Let `target` answer every prompt of the file `prompts` and write the answers into the folder `out`.

    Every user turn becomes one row (a draft learns its own target's words). Running it again goes on
    where it stopped; a finished folder returns at once. The first `limit` rows are taken (None: all). Prompts of
    more than `max_prompt_tokens`, or too long for the context with `max_new_tokens` after them, are left out and
    counted. `temperature` 0 is greedy; above 0 draws are reproducible from (`seed`, shard). `raw` lets the target
    continue plain text without a template. `dtype` and `device` are as in `dflash.load`. `loader` replaces
    the way a target is found and loaded.

    Raises:
        ConfigError: an option out of range; a batch that does not fit.
        DataError: a bad prompts file (line named); an output folder of another run, damaged, or in use; answers
            from which nothing can be learned.
        ModelError: the target cannot be found or read, or its chat template cannot be used.
    """
    options = _Options(
        target=target, max_new_tokens=max_new_tokens, temperature=float(temperature), batch_size=batch_size,
        shard_size=shard_size, limit=limit, max_prompt_tokens=max_prompt_tokens, system=system, raw=raw, seed=seed,
    )  # fmt: skip
    conversations = read_prompts(prompts, limit=limit)
    run: dict[str, Any] = {"prompts_sha256": file_sha256(prompts), **asdict(options)}
    if dtype is not None:  # without one the loaded target decides
        run["dtype"] = str(choose_dtype(dtype, choose_device(device))).removeprefix("torch.")
    with locked_folder(out):
        refuse_other_run(out, run)
        manifest = read_manifest(out)
        if manifest is not None:
            return _summary(out, manifest, num_resumed=len(manifest.shards), num_new_tokens=0, seconds=0.0)
        loaded = (loader or _load)(target, dtype, device)
        answerer = Answerer(loaded, max_new_tokens=max_new_tokens, temperature=temperature, system=system, raw=raw)
        run |= answerer.identity()
        refuse_other_run(out, run)
        write_json_atomically(out / RUN_NAME, run)
        return _Run(answerer, conversations, options, out, run, progress).finish()


class _Run:
    """The shards of one run: which are there, which are to be made, and how far it is."""

    def __init__(
        self,
        answerer: Answerer,
        conversations: Sequence[Conversation],
        options: _Options,
        out: Path,
        run: dict[str, Any],
        progress: Callable[[PrepareProgress], None] | None,
    ) -> None:
        self._answerer = answerer
        self._options = options
        self._out = out
        self._run = run
        self._progress = progress
        self._parts = _chunks(conversations, options.shard_size)
        self._max_prompt_tokens = _prompt_limit(options, answerer.context_length)
        self._num_total = sum(len(conversation.turns) for conversation in conversations)
        self._num_done = 0
        self._num_resumed = 0
        self._num_new_tokens = 0
        self._begin = time.perf_counter()

    def finish(self) -> PrepareSummary:
        """Make what is missing, then close the set."""
        records: dict[int, ShardRecord] = {}
        for index, part in enumerate(self._parts):
            path = self._path(index)
            if path.exists():
                records[index] = finished_shard(path, part)
                self._num_done += sum(len(conversation.turns) for conversation in part)
        num_resumed_shards = len(records)
        self._num_resumed = self._num_done
        self._begin = time.perf_counter()
        self._report()
        for index, part in enumerate(self._parts):
            if index not in records:
                rows = self._answer_shard(index, part)
                _refuse_empty(rows, any(record.num_rows > record.num_empty for record in records.values()))
                records[index] = write_shard(self._path(index), rows)
                self._report()
        shards = tuple(records[index] for index in range(len(self._parts)))
        num_skipped = self._num_total - sum(shard.num_rows for shard in shards)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        manifest = Manifest(run={**self._run, "versions": versions}, num_skipped=num_skipped, shards=shards)
        if not manifest.total("num_rows"):
            raise DataError(
                f"every prompt is longer than {self._max_prompt_tokens} tokens: no answers. Use shorter prompts, or "
                "a larger max_prompt_tokens in a new output folder."
            )
        write_manifest(self._out, manifest)
        seconds = time.perf_counter() - self._begin
        return _summary(self._out, manifest, num_resumed_shards, self._num_new_tokens, seconds)

    def _answer_shard(self, index: int, part: Sequence[Conversation]) -> list[AnswerRow]:
        """Rows of one shard in file order; a function of (weights, options, shard index) alone."""
        rows: dict[tuple[int, int], AnswerRow] = {}
        histories = {place: conversation.opening(self._options.system) for place, conversation in enumerate(part)}
        with self._answerer.seeded(self._options.seed, index):
            for turn in range(max(len(conversation.turns) for conversation in part)):
                open_prompts = self._open_prompts(part, histories, turn)
                order = sorted(open_prompts, key=lambda place: (-len(open_prompts[place]), place))
                for batch in _chunks(order, self._options.batch_size):
                    answers = self._answerer.answer([open_prompts[place] for place in batch])
                    for place, answer_ids in zip(batch, answers, strict=True):
                        rows[place, turn] = _row(part[place], turn, open_prompts[place], answer_ids)
                        _next_turn(histories[place], part[place], turn, self._answerer.text(answer_ids))
                    self._num_done += len(batch)
                    self._num_new_tokens += sum(map(len, answers))
                    self._report()
        return [rows[key] for key in sorted(rows)]

    def _open_prompts(
        self, part: Sequence[Conversation], histories: dict[int, list[Message]], turn: int
    ) -> dict[int, list[int]]:
        """Prompt ids by place in the shard for turn `turn`; a conversation that grew too long ends here."""
        prompts: dict[int, list[int]] = {}
        for place in list(histories):
            if turn >= len(part[place].turns):
                continue
            try:
                ids = self._answerer.prompt_ids(histories[place])
            except DataError as error:
                raise DataError(f"prompt {part[place].id!r}: {error}") from error
            if len(ids) <= self._max_prompt_tokens:
                prompts[place] = ids
            else:
                self._num_done += len(part[place].turns) - turn
                del histories[place]
        return prompts

    def _path(self, index: int) -> Path:
        return self._out / f"answers-{index:05d}.jsonl"

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(
                PrepareProgress(
                    num_done=self._num_done,
                    num_total=self._num_total,
                    num_resumed=self._num_resumed,
                    num_new_tokens=self._num_new_tokens,
                    seconds=time.perf_counter() - self._begin,
                )
            )


def _chunks(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """`items` in order, `size` at a time; the last piece may be shorter."""
    return [items[begin : begin + size] for begin in range(0, len(items), size)]


def _row(conversation: Conversation, turn: int, prompt_ids: list[int], answer_ids: list[int]) -> AnswerRow:
    return AnswerRow(
        id=conversation.turn_id(turn),
        source=conversation.source,
        prompt_ids=array("i", prompt_ids),
        answer_ids=array("i", answer_ids),
    )


def _next_turn(history: list[Message], conversation: Conversation, turn: int, answer: str) -> None:
    """Append the answer and the user's next turn, if there is one."""
    if turn + 1 < len(conversation.turns):
        history.append({"role": "assistant", "content": answer})
        history.append({"role": "user", "content": conversation.turns[turn + 1]})


def _prompt_limit(options: _Options, context_length: int | None) -> int:
    """Longest prompt that is answered: the option, or what the context leaves."""
    if context_length is None:
        return options.max_prompt_tokens
    room = context_length - options.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"max_new_tokens {options.max_new_tokens} leaves no room for a prompt in the target's context of "
            f"{context_length} positions; use fewer."
        )
    return min(options.max_prompt_tokens, room)


def _refuse_empty(rows: Sequence[AnswerRow], answered_before: bool) -> None:
    """Stop a run whose answers hold nothing to learn before it spends hours."""
    if rows and not answered_before and all(row.is_empty for row in rows):
        raise DataError(
            f"all {len(rows)} answers of this shard are empty (at most the end token): the answer mask would be empty. "
            "Check the target's chat template, or use raw mode (--raw) with a base model."
        )


def _summary(out: Path, manifest: Manifest, num_resumed: int, num_new_tokens: int, seconds: float) -> PrepareSummary:
    return PrepareSummary(
        out=out,
        num_answers=manifest.total("num_rows"),
        num_skipped=manifest.num_skipped,
        num_empty=manifest.total("num_empty"),
        num_prompt_tokens=manifest.total("num_prompt_tokens"),
        num_answer_tokens=manifest.total("num_answer_tokens"),
        num_shards=len(manifest.shards),
        num_resumed_shards=num_resumed,
        seconds=seconds,
        tokens_per_second=num_new_tokens / seconds if num_new_tokens else 0.0,
    )


def _load(target: str, dtype: str | None, device: str | None) -> LoadedTarget:
    """The default loader: any name, hub id, folder or GGUF file, as in `dflash.load`."""
    place = choose_device(device)
    set_threads(None)
    return load_target(resolve_target(target), dtype=choose_dtype(dtype, place), device=place, spread=spread_of(device))
