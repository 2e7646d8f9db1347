"""What is asked, in which order: the plan of a run, as batches. Pure data; asks nothing.

Where requests follow one another, the forms alternate prompt by prompt (A B A B): a machine that slows down while the
run goes on slows all forms alike. Where requests overlap, a batch is the whole set, and forms alternate batch by batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash.bench.datasets.base import Questions
from dflash.bench.protocol import Form, Sampling
from dflash.bench.record import BatchPart, LoadPart
from dflash.errors import ConfigError
from dflash.prepare.prompts import Conversation


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that a run asks."""

    questions: tuple[Questions, ...]
    sampling: Sampling
    loads: tuple[LoadPart, ...] = (LoadPart(),)
    repeats: int = 1
    warm_up_tokens: int = 16
    """Length of the answers that are thrown away first, one per form; 0 = no warm-up."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"--repeats must be at least 1, not {self.repeats}.")
        if not self.questions:
            raise ConfigError("nothing to ask: name a data set.")
        if self.sampling.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens must be at least 1, not {self.sampling.max_new_tokens}.")
        for load in self.loads:
            if (load.concurrency or 1) < 1:
                raise ConfigError(f"--concurrency must be at least 1, not {load.concurrency}.")
            if load.rate is not None and not 0 < load.rate < float("inf"):
                raise ConfigError(f"--rate must be positive, not {load.rate}.")
        if len({load.label for load in self.loads}) < len(self.loads):
            raise ConfigError("--concurrency names a number twice; leave one out.")

    def fingerprint(self, forms: Sequence[Form]) -> str:
        """Changes with anything that makes batches of two runs incomparable; what a resumed run must share."""
        asked = {
            "questions": [[one.name, one.sha256] for one in self.questions],
            "sampling": vars(self.sampling),
            "loads": [load.model_dump() for load in self.loads],
            "repeats": self.repeats,
            "forms": [form.name for form in forms],
        }
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Batch:
    """Conversations to be asked in one form without a break."""

    data_set: str
    load: LoadPart
    repeat: int
    form: str
    conversations: tuple[Conversation, ...]

    @property
    def key(self) -> tuple[str, str, int, str, tuple[str, ...]]:
        """As `record.BatchPart.key`."""
        return self.data_set, self.load.label, self.repeat, self.form, tuple(one.id for one in self.conversations)

    @property
    def num_requests(self) -> int:
        """Turns of all conversations."""
        return sum(len(one.turns) for one in self.conversations)


def chosen_forms(forms: Sequence[Form], names: Sequence[str]) -> list[Form]:
    """Those called `names`, in the backend's order; without names, those measured by default. Raises ConfigError."""
    known = [form.name for form in forms]
    for name in names:
        if name not in known:
            raise ConfigError(f"--form {name!r} is none of this backend's forms: {', '.join(known)}.")
    return [form for form in forms if (form.name in names if names else form.by_default)]


def plan(workload: Workload, forms: Sequence[Form]) -> Iterator[Batch]:
    """All batches in order."""
    for questions in workload.questions:
        for load in workload.loads:
            whole = questions.conversations
            groups = [(one,) for one in whole] if load.sequential else [whole]
            for group in groups:
                for repeat in range(workload.repeats):
                    for form in forms:
                        yield Batch(questions.name, load, repeat, form.name, group)


def remaining(batches: Iterator[Batch], done: Sequence[BatchPart]) -> list[Batch]:
    """Those that are not among `done` yet; a batch that was cut short or had failures is asked again."""
    finished = {part.key for part in done if is_settled(part)}
    return [batch for batch in batches if batch.key not in finished]


def is_settled(part: BatchPart) -> bool:
    """Complete and without a failure that another try might not have."""
    return part.complete and all(request.failure in (None, "prompt") for request in part.requests)
