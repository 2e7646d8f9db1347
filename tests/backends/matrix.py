"""What every architecture must pass, as functions that say how far a target is from the bare Transformers model.

The reference is always one forward of the bare model without a cache: it shares no code with our states and masks.
Used by the tests and by scripts/write_architectures.py, which prints the table of docs/architectures.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel

from dflash.backends.torch.sampling import TorchAcceptor
from dflash.backends.torch.taps import tapped_layers
from dflash.backends.torch.target import TorchTarget, TorchTargetSession
from dflash.core.loop import speculative_rounds
from dflash.core.stopping import StopRule
from dflash.errors import UnsupportedModel
from dflash.types import Proposal, SamplingParams
from tests.backends.architectures import ARCHITECTURES, VOCAB_SIZE, WINDOW, model_of, tokens

PROMPT = tokens(2 * WINDOW + 5)
"""Longer than two windows."""
BLOCK = tokens(5, seed=1)
NEXT = tokens(3, seed=2)
NUM_TOKENS = 32
"""Four windows deep, behind a prompt of more than two."""
BLOCK_SIZE = 6
DRAFTERS = ("random", "own text", "adversarial")


@torch.no_grad()
def bare_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(ids), V] of the bare model, without a cache."""
    logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def rollback_error(target: TorchTarget, kept: int, *, exact: bool) -> float:
    """Prefill, verify a block, keep `kept` rows, and one more step: the largest difference of the next logits and of
    a further round's from those of a run that was only ever fed the kept tokens."""
    session = target.session(exact=exact)
    session.prefill(PROMPT)
    feed(session, BLOCK)
    session.commit(range(kept))
    fed = [*PROMPT, *BLOCK[:kept]]
    first = feed(session, NEXT)
    session.commit(range(1))
    second = feed(session, NEXT[1:])
    expected = bare_logits(target.model, [*fed, *NEXT])[len(fed) :]
    return max(error(first, expected), error(second, expected[1:]))


def feed(session: TorchTargetSession, ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(ids), V] of a verify forward."""
    logits: torch.Tensor = session.verify(ids[0], Proposal(tuple(ids[1:]))).logits
    return logits


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference."""
    return float((ours - expected).abs().max())


def chunking_error(model: PreTrainedModel, taps: Sequence[int], chunk: int) -> float:
    """The largest difference of a prefill in chunks from the bare model: logits, features, and the next step."""
    target = TorchTarget(model, taps=taps, prefill_chunk=chunk)
    session = target.session()
    verdict = session.prefill(PROMPT)
    expected = bare_logits(model, [*PROMPT, *NEXT])
    found = max(
        error(verdict.logits[0], expected[len(PROMPT) - 1]), error(feed(session, NEXT), expected[len(PROMPT) :])
    )
    if taps:
        found = max(found, error(verdict.features, bare_layer_outputs(model, taps)))
    target.close()
    return found


def bare_layer_outputs(model: PreTrainedModel, taps: Sequence[int], ids: Sequence[int] = PROMPT) -> torch.Tensor:
    """Outputs [len(ids), taps x H] of decoder layers of the bare model, without a cache."""
    outputs: list[torch.Tensor] = []
    for layer in tapped_layers(model, taps, model.config.get_text_config().num_hidden_layers):
        handle = layer.register_forward_hook(
            lambda module, inputs, output: outputs.append(output[0] if isinstance(output, tuple) else output)
        )
        bare_logits(model, ids)
        handle.remove()
    return torch.cat([output[0] for output in outputs], dim=-1)


@dataclass
class KnowingDrafter:
    """A drafter that knows the text, spoiled as its kind says; the verified tokens tell it where it is."""

    kind: str
    truth: Sequence[int]
    max_proposal: int = BLOCK_SIZE - 1
    _num_observed: int = 0
    _num_rounds: int = 0
    _random: Random = field(default_factory=lambda: Random(0))

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        self._num_observed += len(token_ids)

    def propose(self, anchor: int, budget: int) -> Proposal:
        right = list(self.truth[self._num_observed + 1 :][:budget])
        good = self._good()
        return Proposal(tuple(token if good[slot] else self._wrong(token) for slot, token in enumerate(right)))

    def _good(self) -> list[bool]:
        """Which slots are right: none but by chance; three of four; all but one, another one in each round."""
        self._num_rounds += 1
        if self.kind == "random":
            return [False] * self.max_proposal
        if self.kind == "own text":
            return [self._random.random() < 0.75 for _ in range(self.max_proposal)]
        return [slot != self._num_rounds % self.max_proposal for slot in range(self.max_proposal)]

    def _wrong(self, token: int) -> int:
        return self._random.randrange(VOCAB_SIZE) if self.kind == "random" else (token + 1) % VOCAB_SIZE


def decode(target: TorchTarget, drafter: KnowingDrafter | None, *, exact: bool = False) -> list[int]:
    """NUM_TOKENS greedy tokens behind the prompt."""
    session = target.session(exact=exact)
    params = SamplingParams(max_new_tokens=NUM_TOKENS)
    acceptor = TorchAcceptor(params, PROMPT, target.vocab_size, target.device)
    rounds = speculative_rounds(session, drafter, acceptor, StopRule(()), PROMPT, max_new_tokens=NUM_TOKENS)
    text = [token for step in rounds for token in step.tokens]
    session.close()
    return text


def bare_text_is(model: PreTrainedModel, text: Sequence[int]) -> bool:
    """Whether `text` is what the bare model says greedily behind the prompt, one forward over all of it."""
    rows = bare_logits(model, [*PROMPT, *text])[len(PROMPT) - 1 : -1]
    return bool((rows.argmax(dim=-1) == torch.tensor(text)).all())


TOLERANCE = 2e-3
"""Differences are of the order 1e-5 and logits of the order 1; a wrong row costs 0.1 and more, which is asserted."""
UNTAPPED = ("Gemma 3n",)
"""Families whose layers return several streams of hidden states."""


def kinds_of(model: PreTrainedModel) -> list[str]:
    """Kinds of layer state that a model has, as docs/architectures.md names them."""
    target = TorchTarget(model)
    session = target.session(exact=False)
    session.prefill(PROMPT)
    latent = getattr(model.config.get_text_config(), "kv_lora_rank", None) is not None
    names = {
        "DynamicLayer": "latent" if latent else "full",
        "DynamicSlidingWindowLayer": "window",
        "DynamicIndexedLayer": "indexed",
        "MiniMaxM3VLSparseCacheLayer": "indexed",
        "DummyLayer": "shared",
        "LinearAttentionAndFullAttentionLayer": "recurrent and full",
    }
    found = []
    for spec, layer in zip(target.layer_specs, session._cache.layers, strict=True):
        recurrent = "convolution" if layer.keeps_prefixes else "recurrent"
        found.append(names.get(spec.state, recurrent))
    target.close()
    return list(dict.fromkeys(found))


def rolls_back(model: PreTrainedModel) -> bool:
    """Every kept count, in both modes of decoding."""
    target = TorchTarget(model, exact_width=4)
    counts = range(len(BLOCK) + 1)
    passed = all(rollback_error(target, kept, exact=bool(kept % 2)) < TOLERANCE for kept in counts)
    target.close()
    return passed


def same_text(model: PreTrainedModel) -> dict[str, bool]:
    """Whether the greedy text is the bare model's, alone ("plain") and with each drafter."""
    target = TorchTarget(model, exact_width=4)
    plain = decode(target, None)
    passed = {"plain": bare_text_is(model, plain) and len(set(plain)) > 8}  # one that repeats itself would hide faults
    for kind in DRAFTERS:
        passed[kind] = decode(target, KnowingDrafter(kind, [*PROMPT, *plain]), exact=kind == "own text") == plain
    target.close()
    return passed


def chunks_agree(family: str) -> bool:
    """A prompt fed one by one, by six and at once."""
    taps = () if family in UNTAPPED else (0,)
    return all(chunking_error(model_of(family), taps, chunk) < TOLERANCE for chunk in (1, 6, len(PROMPT)))


def judge(family: str) -> list[str]:
    """The cells of a family's row behind its name and class."""
    model = model_of(family)
    try:
        target = TorchTarget(model)
    except UnsupportedModel as refusal:
        return [f"refused: {str(refusal).split(',')[0]}"]
    trees = "yes" if target.session().supports_trees else "no"
    target.close()
    text = same_text(model)
    passed = [rolls_back(model), *(text["plain"] and text[kind] for kind in DRAFTERS), chunks_agree(family)]
    return [", ".join(kinds_of(model)), trees, *("yes" if good else "no" for good in passed)]


def table(verdicts: Mapping[str, Sequence[str]]) -> str:
    """The table of docs/architectures.md."""
    head = [
        "family",
        "class",
        "kinds of state",
        "trees",
        "rollback",
        *(f"{NUM_TOKENS} tokens, {d}" for d in DRAFTERS),
        "chunks",
    ]
    lines = [head, ["---"] * len(head)]
    for family, cells in verdicts.items():
        row = [family, f"`{ARCHITECTURES[family].model}`", *cells]
        lines.append([*row, *[""] * (len(head) - len(row))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
