"""Token identity of trees in mode fast on MLX, greedy and sampled, in float32; features too, whatever was branched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")

from dflash.backends.mlx.sampling import MLXAcceptor  # noqa: E402
from dflash.backends.mlx.target import MLXTarget  # noqa: E402
from dflash.core.cost import CostTracker  # noqa: E402
from dflash.core.drafting import SharedDrafter, make_session  # noqa: E402
from dflash.core.loop import speculative_rounds  # noqa: E402
from dflash.core.memory import Memory  # noqa: E402
from dflash.core.stopping import StopRule  # noqa: E402
from dflash.types import CandidateTable, Drafting, Round, SamplingParams  # noqa: E402
from tests.backends.mlx.families import FAMILIES, MAX_LENGTH, VOCAB_SIZE, tokens  # noqa: E402
from tests.backends.mlx.test_families import close  # noqa: E402
from tests.backends.modes import CHEAP_ROWS, Forgetful, text_of  # noqa: E402

PROMPT = tokens(17)
NUM_TOKENS = 24
NAMES = ("Llama", "Qwen3", "Gemma 3", "gpt-oss")


@dataclass
class Remembers(Forgetful):
    """The draft that knows the text and errs now and then, over MLX's features."""

    rows: list[Any] = field(default_factory=list)

    def observe(self, token_ids: Sequence[int], features: Any) -> None:
        assert len(features) == len(token_ids)
        self.rows.append(features)
        self._num_seen += len(token_ids)


class Clueless(Remembers):
    """Guesses that are right by luck only."""

    def candidates(self, anchor: int, budget: int, count: int) -> CandidateTable:
        found = super().candidates(anchor, budget, count)
        ids = [[self._random.randrange(VOCAB_SIZE) for _ in row] for row in found.ids]
        distinct = [list(dict.fromkeys([*row, *range(VOCAB_SIZE)]))[: len(row)] for row in ids]
        return CandidateTable(distinct, found.log_probs)


def decode(target: MLXTarget, drafter: SharedDrafter | None, temperature: float) -> list[Round]:
    """The rounds of one text in mode fast; plain decoding without a drafter."""
    session = target.session(exact=False, features=drafter is not None)
    made = None
    if drafter is not None:
        made = make_session(
            drafter,
            Drafting(mode="fast", draws=False),
            Memory(CostTracker(CHEAP_ROWS)),
            max_rows=9,
            supports_trees=session.supports_trees,
            clock=lambda: 0.0,
        )
    params = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=temperature, seed=7)
    acceptor = MLXAcceptor(params, PROMPT, target.vocab_size)
    rounds = list(speculative_rounds(session, made, acceptor, StopRule(()), PROMPT, max_new_tokens=NUM_TOKENS))
    session.close()
    return rounds


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_trees_give_the_plain_text(name: str, temperature: float) -> None:
    """Fault: a branch that was kept or rejected leaves a state, a position or a feature where the text did not go.
    Guesses are both accepted and rejected."""
    target = MLXTarget(FAMILIES[name].build(), max_length=MAX_LENGTH, taps=(0, 1))
    plain = text_of(decode(target, None, temperature))
    for kind in (Remembers, Clueless):
        drafter = kind([*PROMPT, *plain])
        rounds = decode(target, drafter, temperature)
        assert text_of(rounds) == plain
        assert any(step.num_slots not in (None, step.num_proposed) for step in rounds), kind
        assert kind is Clueless or sum(step.num_accepted for step in rounds) > 3
        features = mx.concatenate(drafter.rows)
        whole = target.session(exact=False).prefill([*PROMPT, *plain][: len(features)]).features
        close(features, whole)
    target.close()
