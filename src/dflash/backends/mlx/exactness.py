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
from dflash.core.exactness import WidthClass, find_width_class
from dflash.core.key_lengths import BLOCK, BUCKETS, Attend, find_key_lengths

MAX_WIDTH = 32
HEAD_DIM, NUM_ROWS = 64, 4
"""Of the attention that numbers of keys are compared with."""


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
    if lengths != BUCKETS:
        return WidthClass(False, 1, (), "attention's sums depend on how many keys it gets.")
    target = MLXTarget(model, max_length=max_length, kv_bits=kv_bits)
    session = target.session(exact=True)
    try:
        found = find_width_class(session, target.vocab_size, min(max_width, max_length // 3), block_size, _same)
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
    shapes = (NUM_ROWS, 3 * BLOCK, 3 * BLOCK)
    query, key, value = (
        mx.random.normal((1, 1, num_rows, HEAD_DIM), dtype, key=mx.random.key(seed))
        for seed, num_rows in enumerate(shapes)
    )

    def attend(seen: int, num_keys: int) -> mx.array:
        mask = mx.broadcast_to(mx.arange(num_keys) < seen, (1, 1, NUM_ROWS, num_keys))
        keys, values = key[:, :, :num_keys], value[:, :, :num_keys]
        return mx.fast.scaled_dot_product_attention(query, keys, values, scale=HEAD_DIM**-0.5, mask=mask)

    return attend


def _same(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b))
