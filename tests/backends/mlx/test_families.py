"""Every family of mlx-lm that a target may come from: rolled back exactly, or refused with the reason.

Also the table of docs/mlx.md, which this file keeps true.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")

from dflash.backends.mlx.target import MLXTarget, MLXTargetSession  # noqa: E402
from dflash.errors import UnsupportedModel  # noqa: E402
from dflash.types import Proposal  # noqa: E402
from tests.backends.mlx.families import FAMILIES, MAX_LENGTH, tokens  # noqa: E402

PROMPT = tokens(11)
BLOCK = tokens(6, seed=1)
NEXT = tokens(3, seed=2)
SUPPORTED = [name for name, family in FAMILIES.items() if family.refused is None]
RECURRENT = re.compile("delta|convolution|Mamba-2, full")
REFUSED = [name for name, family in FAMILIES.items() if family.refused is not None]


def target(model: Any, **options: Any) -> MLXTarget:
    return MLXTarget(model, max_length=MAX_LENGTH, taps=(0, 1), **options)


def close(ours: Any, expected: Any, *, tolerance: float = 1e-4) -> None:
    scale = float(mx.maximum(mx.abs(expected).max(), 1))
    assert float(mx.abs(ours - expected).max()) < tolerance * scale


def after_rounds(session: MLXTargetSession, kept: int) -> Any:
    """One more step after a prompt and a block of which `kept` rows were committed."""
    session.prefill(PROMPT)
    session.verify(BLOCK[0], Proposal(tuple(BLOCK[1:])))
    session.commit(range(kept))
    return session.verify(NEXT[0], Proposal(tuple(NEXT[1:])))


@pytest.mark.parametrize("name", SUPPORTED)
def test_rollback_oracle(name: str) -> None:
    """Fault: rejected rows stay visible or in a sum, kept rows are lost, a window forgets what it still needs.

    Prefill, verify, keep k rows, one more step: logits and features must equal those of the bare mlx-lm model over the
    same tokens at once. The random weights tell histories apart by far more than the tolerance, as the end shows. The
    prompt is longer than the windows, so that a ring of their size would have lost keys to the rejected rows.
    """
    model = FAMILIES[name].build()
    shared = target(model)
    steps = {}
    for kept, exact in ((0, True), (1, False), (4, True), (6, False)):
        verdict = after_rounds(shared.session(exact=exact), kept)
        fed = [*PROMPT, *BLOCK[:kept], *NEXT]
        close(verdict.logits, model(mx.array([fed]))[0, -len(NEXT) :])
        fresh = shared.session(exact=exact)
        close(verdict.features, fresh.prefill(fed).features[-len(NEXT) :])
        steps[kept] = verdict.logits
    assert float(mx.abs(steps[4] - steps[6]).max()) > 0.01
    shared.close()


@pytest.mark.parametrize("name", [name for name in SUPPORTED if RECURRENT.search(FAMILIES[name].states)])
def test_fast_rollback_is_the_reference(name: str) -> None:
    """Fault: the layers that are fed again by themselves take other rows in, or the wrong layer's, than the whole model
    that is fed again (the reference)."""
    model = FAMILIES[name].build()
    states = []
    for fast in (True, False):
        shared = target(model, fast_rollback=fast)
        session = shared.session()
        if fast:
            session._refeed = not_called  # type: ignore[method-assign]
        after_rounds(session, 3)
        session.commit(range(2))
        states.append([one for layer in session._cache.layers for one in layer.committed()])
        assert session.num_tokens == len(PROMPT) + 5
        shared.close()
    assert len(states[0]) == len(states[1]) > 0
    for ours, expected in zip(*states, strict=True):
        close(ours, expected, tolerance=1e-5)


def not_called(num_rows: int) -> None:
    raise AssertionError("the whole model was fed again")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    family = FAMILIES[name]
    with pytest.raises(UnsupportedModel, match=str(family.refused)):
        target(family.build())


def test_the_table_of_the_documentation() -> None:
    """Fault: docs/mlx.md promises a family that is not tested, or hides one."""
    text = (Path(__file__).parents[3] / "docs" / "mlx.md").read_text(encoding="utf-8")
    shown = {
        name.strip(): (states.strip(), verdict.strip(), trees.strip())
        for name, states, verdict, trees in re.findall(
            r"^\| ([^|]+) \| ([^|]+) \| ((?:runs|refused)[^|]*) \| ([^|]+) \|$", text, re.MULTILINE
        )
    }
    expected = {
        name: (family.states, "runs", "yes" if family.no_trees is None else "no")
        if family.refused is None
        else (family.states, f"refused: {family.refused}", "-")
        for name, family in FAMILIES.items()
    }
    assert shown == expected
