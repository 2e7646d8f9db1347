"""Engines over tiny random models in memory, with a drafter that is right two times of three: rounds of every shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from dflash.backends.torch.engine import TorchEngine
from dflash.backends.torch.exactness import probe
from dflash.backends.torch.target import TorchTarget
from dflash.core.engine import EngineInfo
from dflash.types import Proposal, SamplingParams

PROMPTS = (("one", list(range(20, 40))), ("two", list(range(60, 75))))
NUM_TOKENS = 24
BLOCK = 6


class Tokenizer:
    """Names tokens by their ids."""

    chat_template = None

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return " ".join(map(str, token_ids))


class KnowingDrafter:
    """Knows the target's texts and repeats them, wrong at every third position."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = texts

    def session(self) -> KnowingSession:
        return KnowingSession(self._texts)


class KnowingSession:
    """One request's drafter."""

    max_proposal = BLOCK - 1

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = texts
        self._seen: list[int] = []

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        self._seen += token_ids

    def propose(self, anchor: int, budget: int) -> Proposal:
        prefix = [*self._seen, anchor]
        known = next((text for text in self._texts if list(text[: len(prefix)]) == prefix), prefix)
        guesses = [*known[len(prefix) : len(prefix) + budget], *[0] * budget][:budget]
        return Proposal(tuple(1 if (len(prefix) + at) % 3 == 0 else token for at, token in enumerate(guesses)))


def engine_of(model: PreTrainedModel) -> TorchEngine:
    """An engine that decodes `model` in the form that the probe finds, with the knowing drafter."""
    found = probe(model, max_width=16, block_size=BLOCK)
    target = TorchTarget(model, exact_width=found.width)
    info = EngineInfo(
        target="tiny",
        target_revision=None,
        draft="knowing",
        draft_revision=None,
        draft_sha256=None,
        block_size=BLOCK,
        width=None,
        dtype=str(model.dtype).removeprefix("torch."),
        device="cpu",
        num_threads=1,
        exactness=found,
    )
    tokenizer: Any = Tokenizer()
    engine = TorchEngine(target=target, drafter=None, tokenizer=tokenizer, eos_ids=frozenset(), info=info)
    params = SamplingParams(max_new_tokens=NUM_TOKENS)
    drafter: Any = KnowingDrafter(
        [[*ids, *engine.generate(prompt_ids=ids, params=params).token_ids] for _, ids in PROMPTS]
    )
    engine.drafter = drafter
    return engine
