"""Which numbers of keys give the same bits in attention here? A measurement at load, on random keys.

Knows how to see which attention a target computes, and the two ways to compute it; which lengths are compared is
`core/key_lengths.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from dflash.backends.torch.attention import AttentionForm, attend
from dflash.backends.torch.target import TorchTarget
from dflash.core.key_lengths import BLOCK, WIDTHS, KeyLengths, find_key_lengths
from dflash.types import Proposal

STEP = 32
"""On CPUs, where attention costs as many keys as it gets."""
STEP_ON_DEVICES = 128
"""Where it does not, and shapes should seldom change."""
MOST_HEADS = 2
"""Key/value heads of the test. On CPUs each is summed by one thread, unless there is only one."""
SEEN_KEYS = 384
"""Keys of the forward that is watched: no width of a head, so that products with keys and with values differ."""
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class AttentionShape(NamedTuple):
    """One attention of a target."""

    is_fused: bool
    """By `attend`; else by two products, as eager models do."""
    kv_heads: int
    key_width: int
    value_width: int


def measured_lengths(target: TorchTarget) -> KeyLengths | None:
    """The numbers of keys that exact forwards of `target` may get; None if no set of them gives the same bits. Takes
    two forwards and some hundredths of a second."""
    shapes, all_seen = attention_shapes(target)
    step = STEP if target.device.type == "cpu" else STEP_ON_DEVICES
    # Of attention that is not seen, only whole blocks: the fewest lengths, which the probe's own forwards must do for.
    allowed = set(range(step, BLOCK + 1, step)) if all_seen else {BLOCK}
    for shape in shapes:
        found = find_key_lengths(RandomAttention(target, shape), torch.equal, step)
        if found is None:
            return None
        allowed &= set(found.within)
    return KeyLengths(tuple(sorted(allowed)))


def attention_shapes(target: TorchTarget) -> tuple[list[AttentionShape], bool]:
    """The different attentions that a decoding forward of `target` computes over its keys, seen in one; and whether
    there was one for every layer that keeps keys."""
    session = target.session(exact=True, features=False)
    session.return_at_least(SEEN_KEYS)
    try:
        session.prefill([0])
        with _Watch() as watch:
            session.verify(0, Proposal())
    finally:
        session.close()
    num_layers = sum(spec.mask is not None and spec.state != "DummyLayer" for spec in target.layer_specs)
    return sorted(watch.shapes), 0 < num_layers <= watch.num_seen


class _Watch(TorchFunctionMode):
    """Notes attention where this thread computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[AttentionShape] = set()
        self.num_seen = 0
        self._key_width = 0  # of the scores seen last

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | {**kwargs}
            self._saw(True, named["key"].shape, named["value"].shape)
        elif func in _PRODUCTS and len(args) == 2 and args[1].dim() == 4:
            shape = args[1].shape
            if shape[2] == SEEN_KEYS:
                self._saw(False, (*shape[:3], self._key_width or shape[3]), shape)
            elif shape[3] == SEEN_KEYS:
                self._key_width = shape[2]
        return func(*args, **kwargs)

    def _saw(self, is_fused: bool, key: Sequence[int], value: Sequence[int]) -> None:
        """Attention over keys and values of these shapes, [B, kv_heads, keys, width]."""
        self.num_seen += 1
        self.shapes.add(AttentionShape(is_fused, key[1], key[3], value[3]))


class RandomAttention:
    """Attention of some fixed random rows in forwards of different widths, as a target's layers attend."""

    def __init__(self, target: TorchTarget, shape: AttentionShape, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(num_heads: int, *shape: int) -> torch.Tensor:
            drawn = torch.randn(1, num_heads, *shape, generator=generator)
            return drawn.to(target.device, target.dtype)

        self._form = target.attention if shape.is_fused else AttentionForm()
        self._is_fused = shape.is_fused
        self._scaling = shape.key_width**-0.5
        heads = min(MOST_HEADS, shape.kv_heads)
        self._query = normal(heads * self._form.group, max(WIDTHS), shape.key_width)
        # The second half of every step has the first one's keys and its values with the other sign. What is left of a
        # sum is the error of its order, which rounding to a short dtype would hide in a sum of some size. Values of
        # many magnitudes leave one also where products are exact.
        halves = (heads, 3 * BLOCK // STEP, STEP // 2)
        key = normal(*halves, shape.key_width)
        value = normal(*halves, shape.value_width) * torch.exp2(normal(*halves, 1) * 2)
        self._key = torch.cat([key, key], dim=3).flatten(2, 3)
        self._value = torch.cat([value, -value], dim=3).flatten(2, 3)

    @torch.inference_mode()
    def __call__(self, seen: int, num_keys: int) -> torch.Tensor:
        """[1, heads, rows of all widths, value width]."""
        return torch.cat([self._forward(width, seen, num_keys) for width in WIDTHS], dim=2)

    def _forward(self, width: int, seen: int, num_keys: int) -> torch.Tensor:
        query, key, value = self._query[:, :, :width], self._key[:, :, :num_keys], self._value[:, :, :num_keys]
        mask = query.new_zeros(1, 1, self._form.num_rows(width, exact=True), num_keys)
        mask[..., seen:] = torch.finfo(query.dtype).min
        if self._is_fused:
            return attend(query, key, value, self._form.mask(mask), self._scaling)
        scores = query @ key.transpose(2, 3) * self._scaling + mask
        attended: torch.Tensor = scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value
        return attended
