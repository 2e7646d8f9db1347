"""Every way to draft over every kind of layer state, as functions that say whether the text is that of plain decoding.

A row of the table is a family of `architectures.py` that stands for a kind of state, a column a way to draft. The draft
here knows the text and errs now and then, so that every kind of acceptance occurs; it also keeps the features that it
is given, which must be those of the bare model whatever was fed, branched and rejected in between. Used by the
tests and by scripts/write_architectures.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from dflash.backends.torch.drafters.autoregressive import AutoregressiveDrafter
from dflash.backends.torch.sampling import TorchAcceptor
from dflash.backends.torch.target import TorchTarget
from dflash.core.cost import CostCurve, CostTracker
from dflash.core.drafting import CopyDrafter, SharedDrafter, make_session
from dflash.core.loop import speculative_rounds
from dflash.core.memory import Memory
from dflash.core.protocols import Drafter
from dflash.core.stopping import StopRule
from dflash.types import CandidateTable, Drafting, Proposal, Round, SamplingParams
from tests.backends.architectures import ARCHITECTURES, VOCAB_SIZE, model_of
from tests.backends.matrix import PROMPT, TOLERANCE, bare_layer_outputs, bare_logits, error, kinds_of

NUM_TOKENS = 20
"""Behind a prompt of more than two windows."""
STATES: Mapping[str, str] = MappingProxyType(
    {
        "Llama": "full",
        "Mistral": "window",
        "Gemma 4": "shared keys and values",
        "DeepSeek-V3, Kimi-K2": "latent",
        "GLM-MoE-DSA": "indexed (sparse)",
        "MiniMax-M3": "indexed by blocks",
        "Qwen3.5": "gated delta",
        "Granite 4": "Mamba-2 beside attention",
        "Mamba-2": "Mamba-2 alone",
        "Falcon-H1": "Mamba-2 and attention in one layer",
        "LFM2": "convolution",
    }
)
"""Family -> the kind of state that it stands for."""
TEMPERATURES = (0.0, 1.0)
CHEAP_ROWS = CostCurve((1, 64), (0,), ((1.0, 1.3),))
FEW = 5
"""Tokens that the texts of copies are made of, so that copies are right now and then."""


@dataclass(frozen=True)
class Way:
    """One way to draft."""

    drafting: Drafting
    kind: str = "block"
    """"block" = the draft that knows the text, "copies" = no draft, "model" = a language model."""
    exact: bool = False
    """Forwards of the bit-exact form: rows padded, keys in buckets, recurrences row by row."""


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "fixed chain": Way(Drafting(fixed=True)),
        "default": Way(Drafting(mode="exact"), exact=True),
        "trees": Way(Drafting(mode="fast", draws=False)),
        "ngram": Way(Drafting(), "copies"),
        "language model": Way(Drafting(fixed=True), "model", exact=True),
    }
)


@dataclass(frozen=True)
class Outcome:
    """What one way gave at one temperature."""

    same_text: bool
    features_error: float
    """Largest difference of the features of all committed rows from the bare model's; 0 where none are recorded."""
    rounds: Sequence[Round]

    @property
    def num_accepted(self) -> int:
        return sum(step.num_accepted for step in self.rounds)

    @property
    def num_rejected(self) -> int:
        return sum(step.num_proposed - step.num_accepted for step in self.rounds)

    @property
    def has_trees(self) -> bool:
        return any(step.num_slots not in (None, step.num_proposed) for step in self.rounds)


@dataclass
class Forgetful:
    """A draft of blocks that knows the text: its first candidate is right in about three of four slots, its second in
    half of the others. Shared side and session in one, since a test makes one of them."""

    text: Sequence[int]
    seen: list[torch.Tensor] = field(default_factory=list)
    max_proposal: int = 5
    _num_seen: int = 0
    _random: Random = field(default_factory=lambda: Random(1))

    def session(self) -> Drafter:
        return self

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        assert len(features) == len(token_ids)
        self.seen.append(features.clone())
        self._num_seen += len(token_ids)

    def propose(self, anchor: int, budget: int) -> Proposal:
        return Proposal(tuple(ids[0] for ids in self.candidates(anchor, budget, 2).ids))

    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        right = list(self.text[self._num_seen + 1 :][: min(budget, self.max_proposal)])
        ids = [self._ranked(token)[:count] for token in right]
        claims = [math.log(share) for share in (0.7, 0.2, 0.05, 0.01)[:count]]
        return CandidateTable(ids, [claims] * len(ids))

    def _ranked(self, token: int) -> list[int]:
        others = [(token + step) % VOCAB_SIZE for step in (1, 2, 3)]
        rank = 0 if self._random.random() < 0.75 else 1 if self._random.random() < 0.5 else 3
        return [*others[:rank], token, *others[rank:]]


@cache
def relative_of(family: str) -> PreTrainedModel:
    """A model that often says what the family's tiny model says: the same with noise on its weights."""
    model = ARCHITECTURES[family].build()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=0.05 * float(parameter.std()))
    return model


def params_of(way: Way, temperature: float) -> SamplingParams:
    """Texts of few different tokens for copies."""
    banned = range(FEW, VOCAB_SIZE) if way.kind == "copies" else ()
    bias = dict.fromkeys(banned, -math.inf)
    return SamplingParams(max_new_tokens=NUM_TOKENS, temperature=temperature, seed=7, logit_bias=bias)


def decode(target: TorchTarget, way: Way, temperature: float, drafter: SharedDrafter | None) -> list[Round]:
    """The rounds of one text; plain decoding without a drafter. Time stands still, so that choices repeat."""
    session = target.session(exact=way.exact, features=isinstance(drafter, Forgetful))
    made = None
    if drafter is not None:
        trees = session.supports_trees
        memory = Memory(CostTracker(CHEAP_ROWS))
        made = make_session(drafter, way.drafting, memory, max_rows=9, supports_trees=trees, clock=lambda: 0.0)
    params = params_of(way, temperature)
    acceptor = TorchAcceptor(params, PROMPT, target.vocab_size, target.device)
    rounds = list(speculative_rounds(session, made, acceptor, StopRule(()), PROMPT, max_new_tokens=NUM_TOKENS))
    session.close()
    return rounds


def text_of(rounds: Sequence[Round]) -> list[int]:
    """All tokens."""
    return [token for step in rounds for token in step.tokens]


@cache
def plain_text(family: str, temperature: float, few: bool) -> tuple[int, ...]:
    """Plain decoding, one row per forward, and checked against the bare model where that is greedy."""
    target = TorchTarget(model_of(family))
    way = WAYS["ngram"] if few else WAYS["fixed chain"]
    text = text_of(decode(target, way, temperature, None))
    target.close()
    if not temperature:
        rows = bare_logits(model_of(family), [*PROMPT, *text])[len(PROMPT) - 1 : -1]
        assert rows[:, : FEW if few else VOCAB_SIZE].argmax(-1).tolist() == text
    return tuple(text)


def outcome(family: str, name: str, temperature: float) -> Outcome:
    """Decode with one way and compare."""
    way, model = WAYS[name], model_of(family)
    target = TorchTarget(model, taps=(0,) if way.kind == "block" else (), exact_width=4)
    plain = list(plain_text(family, temperature, way.kind == "copies"))
    drafter: SharedDrafter = CopyDrafter()
    if way.kind == "block":
        drafter = Forgetful([*PROMPT, *plain])
    relative = TorchTarget(relative_of(family)) if way.kind == "model" else None
    if relative is not None:
        drafter = AutoregressiveDrafter(relative, target, chain=3)
    rounds = decode(target, way, temperature, drafter)
    if relative is not None:
        relative.close()
    text, wrong = text_of(rounds), 0.0
    if isinstance(drafter, Forgetful):
        rows = torch.cat(drafter.seen)
        wrong = error(rows, bare_layer_outputs(model, (0,), [*PROMPT, *text])[: len(rows)])
    target.close()
    return Outcome(text == plain, wrong, rounds)


def judge_ways(family: str) -> list[str]:
    """The cells of a family's row: whether each way gives the plain text, greedily and sampled."""
    cells = [family, ", ".join(kinds_of(model_of(family))), STATES[family]]
    for name in WAYS:
        found = [outcome(family, name, temperature) for temperature in TEMPERATURES]
        cells.append("yes" if all(one.same_text and one.features_error < TOLERANCE for one in found) else "no")
    return cells


def table_of_ways(rows: Sequence[Sequence[str]]) -> str:
    """The second table of docs/architectures.md."""
    lines = [["family", "kinds of state", "stands for", *WAYS], ["---"] * (3 + len(WAYS)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
