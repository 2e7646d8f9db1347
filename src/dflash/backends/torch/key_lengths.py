"""Which numbers of keys give the same bits in attention here? A measurement at load, on random keys.

Knows the shapes of a target's attention and the two ways in which models compute it; which lengths are compared is
`core/key_lengths.py`.
"""

from __future__ import annotations

import torch

from dflash.backends.torch import compat
from dflash.backends.torch.attention import attend
from dflash.backends.torch.target import TorchTarget
from dflash.core.key_lengths import BLOCK, BUCKETS, KeyLengths, find_key_lengths

STEP = 32
"""On CPUs, where attention costs as many keys as it gets."""
STEP_ON_DEVICES = 128
"""Where it does not, and shapes should seldom change."""
NUM_HEADS = 2
"""Key/value heads of the test. Each is summed alone, so that more would tell nothing."""
NUM_ROWS = 4
"""No block of the kernel has fewer (attention.py)."""


def measured_lengths(target: TorchTarget) -> KeyLengths | None:
    """The numbers of keys that exact forwards of `target` may get; None if no set of them gives the same bits. Takes
    some hundredths of a second."""
    head_dim = _head_dim(target)
    if head_dim is None:
        return BUCKETS  # no attention, or of a kind that says nothing about itself: the probe's forwards must do
    step = STEP if target.device.type == "cpu" else STEP_ON_DEVICES
    return find_key_lengths(_Attention(target, head_dim), torch.equal, step)


class _Attention:
    """Attention of some fixed random rows of a target's shape, in the way that its layers attend."""

    def __init__(self, target: TorchTarget, head_dim: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(num_heads: int, *shape: int) -> torch.Tensor:
            drawn = torch.randn(1, num_heads, *shape, generator=generator)
            return drawn.to(target.device, target.dtype)

        self._form = target.attention
        self._is_eager = target.model.config._attn_implementation == "eager"
        self._scaling = head_dim**-0.5
        self._query = normal(NUM_HEADS * self._form.group, NUM_ROWS, head_dim)
        # The second half of every step has the first one's keys and its values with the other sign. What is left of a
        # sum is the error of its order, which rounding to a short dtype would hide in a sum of some size. Values of
        # many magnitudes leave one also where products are exact.
        halves = (NUM_HEADS, 3 * BLOCK // STEP, STEP // 2)
        key, value = normal(*halves, head_dim), normal(*halves, head_dim) * torch.exp2(normal(*halves, 1) * 2)
        self._key = torch.cat([key, key], dim=3).flatten(2, 3)
        self._value = torch.cat([value, -value], dim=3).flatten(2, 3)

    @torch.inference_mode()
    def __call__(self, seen: int, num_keys: int) -> torch.Tensor:
        """[1, heads, rows, head_dim]."""
        query, key, value = self._query, self._key[:, :, :num_keys], self._value[:, :, :num_keys]
        mask = query.new_zeros(1, 1, self._form.num_rows(NUM_ROWS, exact=True), num_keys)
        mask[..., seen:] = torch.finfo(query.dtype).min
        if not self._is_eager:
            return attend(query, key, value, self._form.mask(mask), self._scaling)
        scores = query @ key.transpose(2, 3) * self._scaling + mask
        attended: torch.Tensor = scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value
        return attended


def _head_dim(target: TorchTarget) -> int | None:
    """Width of an attention head; None if the configuration does not tell."""
    config = compat.text_config(target.model)
    heads, stated = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
    if isinstance(stated, int):
        return stated
    return target.hidden_size // heads if isinstance(heads, int) and heads > 0 else None
