"""The record of a benchmark run: everything that was asked and answered, and all figures, as one line of JSON.

Schema only; `figures.py` fills the summaries, `runner.py` the batches. An optional figure that is None was not told or
not measured; it is never 0 in place of a missing one. A reader of another schema version refuses the line instead of
guessing.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dflash.bench.protocol import Failure, FormKind

SCHEMA: Literal["dflash-bench/1"] = "dflash-bench/1"


class Part(BaseModel):
    """Base of all parts: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RoundsPart(Part):
    """As `protocol.Rounds`."""

    num_rounds: int
    num_tokens: int
    lengths: dict[int, int] | None = None
    num_proposed: int | None = None
    num_accepted: int | None = None
    proposed_per_slot: list[int] | None = None
    accepted_per_slot: list[int] | None = None
    accepted_by_source: dict[str, int] | None = None
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    other_seconds: float | None = None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per round, the target's own included; None without a round."""
        return self.num_tokens / self.num_rounds if self.num_rounds else None


class SharePart(Part):
    """Loops and copies of a text (`core/textshare.py`), counted in tokens, or in words where no ids are told."""

    unit: Literal["token", "word"]
    num: int
    looping: int
    copied: int
    repeated: int


class RequestPart(Part):
    """One turn of one conversation, asked once."""

    prompt_id: str
    turn: int
    """From 0."""
    failure: Failure | None = None
    message: str | None = None
    """What went wrong, in words."""
    text: str = ""
    token_ids: list[int] | None = None
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None
    finish_reason: str | None = None
    total_seconds: float | None = None
    first_token_seconds: float | None = None
    decode_seconds: float | None = None
    rounds: RoundsPart | None = None
    share: SharePart | None = None
    remark: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What the same question has in every form and repeat."""
        return self.prompt_id, self.turn


class LoadPart(Part):
    """How requests follow one another: so many at once, or so many per second."""

    concurrency: int | None = 1
    rate: float | None = None
    """Conversations started per second, evenly spaced; None = closed loop."""

    @property
    def label(self) -> str:
        """'1 at once', '2.5 per second'."""
        return f"{self.rate:g} per second" if self.rate is not None else f"{self.concurrency} at once"

    @property
    def short(self) -> str:
        """The same for a chart: 'c=4', '2.5/s'."""
        return f"{self.rate:g}/s" if self.rate is not None else f"c={self.concurrency}"

    @property
    def sequential(self) -> bool:
        """One request after the other: forms can alternate prompt by prompt."""
        return self.rate is None and self.concurrency == 1


class BatchPart(Part):
    """Conversations asked in one form without a break: one of them where requests follow one another, else all."""

    data_set: str
    load: LoadPart
    repeat: int
    """From 0."""
    form: str
    prompt_ids: list[str]
    """Everything that was to be asked."""
    wall_seconds: float
    complete: bool
    """Everything was asked, whether it failed or not."""
    counters: RoundsPart | None = None
    """Difference of a server's counters over this batch."""
    peak_memory_bytes: int | None = None
    requests: list[RequestPart]

    @property
    def key(self) -> tuple[str, str, int, str, tuple[str, ...]]:
        """What a resumed run recognises it by."""
        return self.data_set, self.load.label, self.repeat, self.form, tuple(self.prompt_ids)


class FormPart(Part):
    """As `protocol.Form`."""

    name: str
    kind: FormKind
    description: str
    reference: str | None = None


class ModelPart(Part):
    """As `protocol.ModelInfo`."""

    name: str
    revision: str | None = None
    sha256: str | None = None


class EnginePart(Part):
    """What ran (`protocol.BackendInfo`)."""

    backend: str
    engine: str
    forms: list[FormPart]
    target: ModelPart | None = None
    draft: ModelPart | None = None
    block_size: int | None = None
    dtype: str | None = None
    device: str | None = None
    num_threads: int | None = None
    details: dict[str, str] = Field(default_factory=dict)
    same_seed_same_text: bool


class DataSetPart(Part):
    """What was asked."""

    name: str
    origin: str
    licence: str
    sha256: str
    """Of the prompts that were asked, in order."""
    num_prompts: int
    num_available: int


class SettingsPart(Part):
    """How it was asked."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    ignore_eos: bool
    thinking: bool | None
    loads: list[LoadPart]
    repeats: int
    warm_up_tokens: int


class ProvenancePart(Part):
    """Where the figures come from."""

    command: str
    started: str
    """ISO 8601, UTC."""
    seconds: float
    """Wall time of the whole run, over all its sittings."""
    git_revision: str | None
    versions: dict[str, str]
    machine: dict[str, str | int | None]


class Span(Part):
    """A figure over the repeats."""

    median: float
    low: float
    high: float
    values: list[float]


class DifferencePart(Part):
    """Where an output first leaves the one that it should repeat."""

    prompt_id: str
    turn: int
    repeat: int
    unit: Literal["token", "character"]
    position: int
    """Index in the output, from 0."""


class IdentityPart(Part):
    """Comparison of a speculative form's outputs with its reference's."""

    reference: str
    num_compared: int
    num_same: int
    differences: list[DifferencePart]


class SpeedupPart(Part):
    """A speculative form against the fastest plain one of the same run."""

    over: str
    """Name of that plain form."""
    basis: Literal["decoding", "whole answers", "throughput"]
    """What was compared: tokens/s after the first token; over whole answers; or of all requests together."""
    repeats: Span
    """One ratio per repeat: how steady the machine was."""
    interval: tuple[float, float] | None
    """95 % of ratios when the prompts are drawn again with replacement: how much it depends on the prompts. None with
    fewer than three prompts, or where requests overlap."""
    limit: float | None
    """tau * t1 / (t_draft + t_verify): what the measured forwards allow if everything else were free."""
    num_prompts: int


class FormFigures(Part):
    """All figures of one form in one cell."""

    form: str
    num_requests: int
    num_done: int
    failures: dict[str, int]
    """Kind -> number."""
    num_tokens: int | None
    decode_tokens_per_second: Span | None
    tokens_per_second: Span | None
    """Tokens of all answers over the time they took together, prompts included."""
    first_token_seconds: Span | None
    """Median over the requests; low and high are the 5th and 95th percentile; no values."""
    seconds_per_token: Span | None
    """After the first one; as above."""
    rounds: RoundsPart | None
    acceptance_length: float | None
    looping_share: float | None
    copied_share: float | None
    repeated_share: float | None
    share_unit: Literal["token", "word"] | None
    peak_memory_bytes: int | None
    num_unsteady: int | None
    """Questions whose output was not the same in every repeat; None with one repeat or random draws."""
    identity: IdentityPart | None
    speedup: SpeedupPart | None


class CellPart(Part):
    """One data set under one load."""

    data_set: str
    load: LoadPart
    fastest_plain: str | None
    forms: list[FormFigures]


class RunRecord(Part):
    """One run, one line."""

    schema_version: Literal["dflash-bench/1"] = SCHEMA
    finished: bool
    """False: stopped by the user or because the engine was gone."""
    stopped_by: str | None
    """Why it did not finish, in words."""
    provenance: ProvenancePart
    engine: EnginePart
    data_sets: list[DataSetPart]
    settings: SettingsPart
    cells: list[CellPart]
    notes: list[str]
    """Sentences for the reader: what was cut, what is missing and why."""
    batches: list[BatchPart]
