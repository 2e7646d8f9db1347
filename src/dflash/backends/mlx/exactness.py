"""Does a row's result depend on the forward it was computed in? The probe of `core/exactness.py` over MLX's kernels.

The answer holds for this model, dtype and device; nothing is stored. A recurrent state is fed again in forwards of any
number of rows, so that only a class of all widths makes it exact.
"""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import mlx.nn as nn

from dflash.backends.mlx.compat import activation_dtype
from dflash.backends.mlx.states.base import BUCKET
from dflash.backends.mlx.target import MLXTarget
from dflash.core.exactness import LENGTHS_DIFFER, WidthClass, find_width_class
from dflash.core.key_lengths import BLOCK, WIDTHS, Attend, find_key_lengths

MAX_WIDTH = 32
HEAD_DIM = 64
"""Of the attention that numbers of keys are compared with."""
STEP = 32
"""Keys within which values cancel."""


def probe(
    model: nn.Module, *, max_length: int, max_width: int = MAX_WIDTH, block_size: int = 1, kv_bits: int | None = None
) -> WidthClass:
    """Find the width class of `model` on MLX's default device.

    Args:
        model: the loaded model as it will decode.
        max_length: its context limit.
        max_width: widest forward to compare; at least 2 and `block_size`.
        block_size: every width up to it is tried, since each can occur in decoding.
        kv_bits: as it will decode.

    Raises:
        UnsupportedModel: the model cannot be decoded losslessly by this version.
    """
    assert max_width >= max(2, block_size)
    lengths = find_key_lengths(_attention(activation_dtype(model)), _same, BUCKET)
    if lengths is None:
        return LENGTHS_DIFFER
    target = MLXTarget(model, max_length=max_length, kv_bits=kv_bits, key_lengths=lengths)
    session = target.session(exact=True)
    try:
        found = find_width_class(session, target.vocab_size, min(max_width, max_length // 3), block_size, _same)
        found = dataclasses.replace(found, key_lengths=lengths)
    finally:
        session.close()
        target.close()
    if found.holds and found.width > 1 and not session.keeps_prefixes:
        reason = f"forwards below {found.width} rows differ, and recurrent layers take their rows in again in such."
        return dataclasses.replace(found, holds=False, width=1, reason=reason)
    return found


def _attention(dtype: mx.Dtype) -> Attend:
    """Attention of a few fixed rows of a usual width, all of which see the first keys. Quantised keys (`kv_bits`) are
    left to the probe's own forwards."""

    def normal(seed: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed))

    # The second half of every step has the first one's keys and its values with the other sign. What is left of a sum
    # is the error of its order, which rounding to a short dtype would hide in a sum of some size.
    halves = (1, 3 * BLOCK // STEP, STEP // 2)
    half_keys, half_values = normal(0, *halves, HEAD_DIM), normal(1, *halves, HEAD_DIM) * 2 ** normal(2, *halves, 1)
    key = mx.concatenate([half_keys, half_keys], axis=2).reshape(1, 1, 3 * BLOCK, HEAD_DIM).astype(dtype)
    value = mx.concatenate([half_values, -half_values], axis=2).reshape(1, 1, 3 * BLOCK, HEAD_DIM).astype(dtype)
    query = normal(3, 1, 1, max(WIDTHS), HEAD_DIM).astype(dtype)

    def attend(seen: int, num_keys: int) -> mx.array:
        keys, values, mask = key[:, :, :num_keys], value[:, :, :num_keys], mx.arange(num_keys) < seen
        rows = [
            mx.fast.scaled_dot_product_attention(
                query[:, :, :width],
                keys,
                values,
                scale=HEAD_DIM**-0.5,
                mask=mx.broadcast_to(mask, (1, 1, width, num_keys)),
            )
            for width in WIDTHS
        ]
        return mx.concatenate(rows, axis=2)

    return attend


def _same(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b))
