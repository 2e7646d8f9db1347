"""Does a row's result depend on the forward it was computed in? A measurement at load, on the machine that decodes.

Speculative decoding computes a token's logits in a forward of several rows, plain decoding in a forward of one. Matrix
kernels choose their summation order by shape, so near-ties may fall the other way. With keys and values of fixed
length the result is the same for all forward widths of a *width class* (docs/exactness.md): typically {1}, {2, 3},
{4, 5, ...} on CPUs, or {1, 2, ...} with packed weights (packing.py). If plain decoding pads its forward to the smallest
width of the class that contains all larger ones, both give the same bits. `probe` finds that width by comparing bits;
it knows nothing of kernels.

The answer holds for this model, dtype, device and number of threads: probe again when one of them changes. Nothing is
stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from dflash.backends.torch.states.sliding import PAGE
from dflash.backends.torch.target import TorchTarget
from dflash.core.exactness import WidthClass
from dflash.types import Proposal, Verdict

MAX_WIDTH = 32
NUM_FIRST = 4
"""Tokens that are tried among equal and among different ones."""
LONGER = (256, 640)
"""Keys of the forwards that stand for longer texts: one more bucket, and more than the 512 that CPU attention splits
keys into."""


class _Session(Protocol):
    """What the probe uses of a target's session in exact mode."""

    def return_at_least(self, num_keys: int) -> None: ...
    def prefill(self, prompt_ids: Sequence[int]) -> Verdict: ...
    def verify(self, anchor: int, proposal: Proposal) -> Verdict: ...
    def commit(self, path: Sequence[int]) -> None: ...


def probe(model: PreTrainedModel, *, max_width: int = MAX_WIDTH, block_size: int = 1) -> WidthClass:
    """Find the width class of `model` on its device, with the present number of threads.

    Feeds a fixed pseudo-random text: the reference computes all rows in one forward of `max_width` rows; then narrower
    forwards that start some rows later (so that a row changes its offset, too) must repeat its rows bit by bit, from
    the widest down to the first that does not; last, the class's narrowest forward is repeated over more keys, as
    later in a text. Prefilled rows need no check: plain and speculative decoding share the prefill.

    Args:
        model: the loaded model as it will decode.
        max_width: widest forward to compare; at least 2 and `block_size`.
        block_size: every width up to it is tried, since each can occur in decoding.

    Raises:
        UnsupportedModel: the model cannot be decoded losslessly by this version.
    """
    assert max_width >= max(2, block_size)
    target = TorchTarget(model)
    max_width = min(max_width, target.max_length // 3)
    session = target.session(exact=True)
    try:
        found = _probe(session, target.vocab_size, max_width, block_size)
        has_windows = any(spec.window is not None for spec in target.layer_specs)
        if found.holds and has_windows and not _windows_may_move_on(target, max_width):
            reason = "results change when masked keys stand in front of a window, as they do late in a text."
            return dataclasses.replace(found, holds=False, width=1, reason=reason)
        return found
    finally:
        session.close()
        target.close()


def _windows_may_move_on(target: TorchTarget, num_rows: int) -> bool:
    """Whether a page of masked keys in front of the window changes no bit; later in a text there is nearly one."""
    text = _text(2 * num_rows, target.vocab_size)
    rows = []
    for lead in (0, PAGE):
        session = target.session(exact=True)
        session.return_at_least(0, lead)
        session.prefill(text[:num_rows])
        rows.append(_rows(session, text[num_rows:]))
        session.close()
    return torch.equal(rows[0], rows[1])


def _probe(session: _Session, vocab_size: int, max_width: int, block_size: int) -> WidthClass:
    shift = max_width // 8 * 2 + 1  # odd: no multiple of a kernel's tile
    text = _text(max_width + shift + max_width, vocab_size)
    session.prefill(text[:max_width])
    text = text[max_width:]
    reference = _rows(session, text[:max_width])
    session.commit(range(shift))
    text, reference = text[shift:], reference[shift:]
    tried: list[int] = []
    width = 0
    for candidate in _candidates(max_width, block_size):
        tried.insert(0, candidate)
        if not _repeats(session, text[:candidate], reference):
            break
        width = candidate

    def fails(reason: str) -> WidthClass:
        return WidthClass(False, 1, tuple(tried), f"{reason}.")

    if not width:
        return fails(f"a row's result depends on its place in a forward of {max_width} rows")
    if width == max_width:
        return fails(f"forwards of {tried[0]} and {max_width} rows differ")
    for num_keys in LONGER:
        session.return_at_least(num_keys)
        if not _repeats(session, text[:width], reference):
            return fails(f"results change when attention runs over {num_keys} keys")
    if not _ignores_other_rows(session, text, width=width, max_width=max_width):
        return fails("a row's result depends on the tokens beside it, as where experts are chosen per token")
    narrower = f"; {tried[0]} differ" if tried[0] < width else ""
    return WidthClass(
        True, width, tuple(tried), f"forwards of {width} to {max_width} rows give the same bits{narrower}."
    )


def _ignores_other_rows(session: _Session, text: list[int], *, width: int, max_width: int) -> bool:
    """Whether the first row has the same bits among equal rows, as padding makes them, and among different ones. An
    expert multiplies the rows that chose it, so their number depends on what the other rows are."""
    for token in text[:NUM_FIRST]:
        equal = _rows(session, [token] * max_width)[0]
        different = _rows(session, [token, *text[: max(1, width - 1)]])[0]
        if not torch.equal(equal, different):
            return False
    return True


def _repeats(
    session: _Session,
    tokens: list[int],
    reference: torch.Tensor,  # [reference rows, V], from the same position on
) -> bool:
    """Whether one forward of `tokens` gives the reference's bits, where it has these rows."""
    rows = _rows(session, tokens)
    num_shared = min(len(rows), len(reference))
    return torch.equal(rows[:num_shared], reference[:num_shared])


def _rows(session: _Session, tokens: list[int]) -> torch.Tensor:
    """Logits [len(tokens), V] of one forward of exactly these rows; not committed."""
    logits: torch.Tensor = session.verify(tokens[0], Proposal(tuple(tokens[1:]))).logits
    return logits


def _candidates(max_width: int, block_size: int) -> list[int]:
    """Widths to compare, widest first: all up to 8 and up to the block, beyond them odd ones (where kernels have
    remainders) and powers of two."""
    widths = {max_width, 23, 16, 11, *range(1, max(8, block_size) + 1)}
    return sorted((width for width in widths if width <= max_width), reverse=True)


def _text(length: int, vocab_size: int) -> list[int]:
    """Token ids without a pattern that attention could lock on to."""
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(vocab_size, (length,), generator=generator).tolist()
    return ids
