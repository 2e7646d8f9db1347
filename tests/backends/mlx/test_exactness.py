"""The width probe over MLX's kernels notices what would break the promise of equal bits."""

from __future__ import annotations

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")

import mlx.nn as nn  # noqa: E402

from dflash.backends.mlx import exactness  # noqa: E402
from dflash.backends.mlx.exactness import probe  # noqa: E402
from dflash.backends.mlx.target import MLXTarget  # noqa: E402
from tests.backends.mlx.families import FAMILIES, MAX_LENGTH  # noqa: E402

NUDGE = 1e-5
"""Far below what changes a text, far above one bit of these hidden states."""


class Nudged(nn.Embedding):
    """An embedding whose rows are all moved a little where its tokens are not all the same."""

    def __call__(self, x: Any) -> Any:
        return super().__call__(x) + NUDGE * (x != x[..., :1]).any()


def test_rows_that_depend_on_their_neighbours_are_noticed() -> None:
    """Fault: an expert multiplies as many rows as chose it, so that a row's bits depend on the other tokens, and the
    probe's own text happens not to show it."""
    model: Any = FAMILIES["Llama"].build()
    found = probe(model, max_length=MAX_LENGTH, max_width=16)
    embedding = model.model.embed_tokens
    model.model.embed_tokens = Nudged(*embedding.weight.shape)
    model.model.embed_tokens.weight = embedding.weight
    broken = probe(model, max_length=MAX_LENGTH, max_width=16)
    assert not broken.holds
    assert not found.holds or "tokens beside it" in broken.reason


@pytest.mark.parametrize(("odd", "expected"), [(256, (128, 384, 512)), (512, None)])
def test_numbers_of_keys_whose_sums_differ_are_left_out(
    monkeypatch: pytest.MonkeyPatch, odd: int, expected: tuple[int, ...] | None
) -> None:
    """Fault: a kernel that sums 256 keys in another order than 384 is called exact, since the probe's text is short, or
    decoding asks for 256 all the same; or one whose whole blocks differ is called exact."""
    attend = exactness._attention(mx.float32)

    def nudged(seen: int, num_keys: int) -> Any:
        return attend(seen, num_keys) + NUDGE * (num_keys == odd)

    monkeypatch.setattr(exactness, "_attention", lambda dtype: nudged)
    model: Any = FAMILIES["Llama"].build()
    found = probe(model, max_length=MAX_LENGTH, max_width=16)
    if expected is None:
        assert not found.holds
        assert "how many keys" in found.reason
        return
    assert found.key_lengths.within == expected
    target = MLXTarget(model, max_length=MAX_LENGTH, exact_width=found.width, key_lengths=found.key_lengths)
    cache: Any = target.session()._cache
    cache.begin(200, exact=True)
    assert {layer._seen() for layer in cache.layers} == {(0, 384)}
    target.close()
