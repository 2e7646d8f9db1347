"""A language model of mlx-lm as the drafter: its state is that of the committed text, whatever was rejected."""

from __future__ import annotations

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")

from dflash.backends.mlx.drafters.autoregressive import AutoregressiveDrafter  # noqa: E402
from dflash.backends.mlx.target import MLXTarget  # noqa: E402
from dflash.core.autoregressive import CHAIN  # noqa: E402
from tests.backends.committed_text import check_table, follow  # noqa: E402
from tests.backends.mlx.families import FAMILIES, MAX_LENGTH, tokens  # noqa: E402

REWINDS = {"Llama": True, "Gemma 3": False, "Qwen3.5": False, "DeepSeek-V3, Kimi-K2": True}
"""Full, windowed, recurrent and latent state: whether it can go back."""


def greedy(model: Any, text: list[int], count: int) -> list[int]:
    """By forwards of the bare model over the whole text."""
    written = list(text)
    for _ in range(count):
        written.append(int(mx.argmax(model(mx.array([written]))[0, -1])))
    return written[len(text) :]


@pytest.mark.parametrize("family", REWINDS)
def test_the_state_equals_that_of_the_committed_text(family: str) -> None:
    """Fault: what was rejected, or asked and never fed, leaves a trace; tokens that were still on the device are taken
    for others. The slow reference never lets layers go back; the last proposal is also the bare model's own text."""
    bare = FAMILIES[family].build()
    model = MLXTarget(bare, max_length=MAX_LENGTH)
    session = AutoregressiveDrafter(model, model).session()
    slow = AutoregressiveDrafter(model, model, rewinds=False).session()
    assert session._rewinds == REWINDS[family]
    *text, anchor = follow((session, slow), tokens(300, seed=5))
    assert list(session.propose(anchor, CHAIN).tokens) == greedy(bare, [*text, anchor], CHAIN)
    model.close()


def test_candidates_are_the_best_of_each_slot() -> None:
    """Fault: the table's first column is not the chain, or log-probabilities are logits; the end of the draft model's
    context is a crash instead of nothing to propose."""
    model = MLXTarget(FAMILIES["Llama"].build(), max_length=40)
    session = AutoregressiveDrafter(model, model).session()
    session.observe([1, 2, 3], None)
    chain = tuple(session.propose(4, 5).tokens)
    table = session.candidates(4, 5, 3)
    check_table(table, chain, 3)
    session.observe([5] * 40, None)
    assert tuple(session.propose(4, 5).tokens) == ()
    assert session.candidates(4, 5, 3).ids == ()
    model.close()
