"""Engines over tiny random models in memory, with a drafter that is right two times of three: rounds of every shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from dflash.backends.torch.engine import TorchEngine
from dflash.backends.torch.exactness import probe
from dflash.backends.torch.target import TorchTarget
from dflash.core.engine import Engine
from dflash.core.engine_info import EngineInfo
from dflash.core.exactness import WidthClass
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


def plain_engine_of(model: PreTrainedModel) -> TorchEngine:
    """An engine without a draft that decodes `model` in the form that the probe finds."""
    found = probe(model, max_width=16, block_size=BLOCK)
    target = TorchTarget(model, exact_width=found.width)
    info = info_of(found, str(model.dtype).removeprefix("torch."), "cpu")
    return TorchEngine(target=target, drafter=None, tokenizer=Tokenizer(), eos_ids=frozenset(), info=info)


def info_of(found: WidthClass, dtype: str, device: str) -> EngineInfo:
    return EngineInfo(
        target="tiny",
        target_revision=None,
        draft="knowing",
        draft_revision=None,
        draft_sha256=None,
        block_size=BLOCK,
        width=None,
        dtype=dtype,
        device=device,
        num_threads=1,
        exactness=found,
    )


def engine_of(model: PreTrainedModel) -> TorchEngine:
    """The same with the knowing drafter."""
    engine = plain_engine_of(model)
    engine.drafter = knowing(engine)
    return engine


def mlx_engine_of(family: str) -> Engine:
    """An engine over a family of mlx-lm with the knowing drafter."""
    from dflash.backends.mlx.engine import MLXEngine
    from dflash.backends.mlx.exactness import probe as mlx_probe
    from dflash.backends.mlx.target import MLXTarget
    from tests.backends.mlx.families import FAMILIES, MAX_LENGTH

    model = FAMILIES[family].build()
    found = mlx_probe(model, max_length=MAX_LENGTH, max_width=16, block_size=BLOCK)
    target = MLXTarget(model, max_length=MAX_LENGTH, exact_width=found.width)
    info = info_of(found, "float32", "mlx cpu")
    engine = MLXEngine(target=target, drafter=None, tokenizer=Tokenizer(), eos_ids=frozenset(), info=info)
    engine.drafter = knowing(engine)
    return engine


def knowing(engine: Engine) -> KnowingDrafter:
    """The drafter that knows what `engine` says to the prompts."""
    params = SamplingParams(max_new_tokens=NUM_TOKENS)
    return KnowingDrafter([[*ids, *engine.generate(prompt_ids=ids, params=params).token_ids] for _, ids in PROMPTS])
