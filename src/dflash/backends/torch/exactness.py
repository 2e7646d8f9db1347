"""Does a row's result depend on the forward it was computed in? A measurement at load, on the machine that decodes.

Speculative decoding computes a token's logits in a forward of several rows, plain decoding in a forward of one. Matrix
kernels choose their summation order by shape, so near-ties may fall the other way. With numbers of keys whose sums
agree (key_lengths.py) the result is the same for all forward widths of a *width class* (docs/exactness.md): typically
{1}, {2, 3}, {4, 5, ...} on CPUs, or {1, 2, ...} with packed weights (packing.py). If plain decoding pads its forward to
the smallest width of the class that contains all larger ones, both give the same bits. `probe` finds that width by
comparing bits (`core/exactness.py`); it knows nothing of kernels.

The answer holds for this model, dtype, device and number of threads: probe again when one of them changes. Nothing is
stored.
"""

from __future__ import annotations

import dataclasses

import torch
from transformers import PreTrainedModel

from dflash.backends.torch.key_lengths import measured_lengths
from dflash.backends.torch.states.sliding import PAGE
from dflash.backends.torch.target import TorchTarget
from dflash.core.exactness import LENGTHS_DIFFER, WidthClass, find_width_class, probe_rows, probe_text

MAX_WIDTH = 32


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
    session = None
    try:
        lengths = measured_lengths(target)
        if lengths is None:
            return LENGTHS_DIFFER
        target.key_lengths = lengths
        session = target.session(exact=True)
        found = find_width_class(session, target.vocab_size, max_width, block_size, torch.equal)
        found = dataclasses.replace(found, key_lengths=lengths)
        has_windows = any(spec.window is not None for spec in target.layer_specs)
        if found.holds and has_windows and not _windows_may_move_on(target, max_width):
            reason = "results change when masked keys stand in front of a window, as they do late in a text."
            return dataclasses.replace(found, holds=False, width=1, reason=reason)
        return found
    finally:
        if session is not None:
            session.close()
        target.close()


def _windows_may_move_on(target: TorchTarget, num_rows: int) -> bool:
    """Whether a page of masked keys in front of the window changes no bit; later in a text there is nearly one."""
    text = probe_text(2 * num_rows, target.vocab_size)
    rows = []
    for lead in (0, PAGE):
        session = target.session(exact=True)
        session.return_at_least(0, lead)
        session.prefill(text[:num_rows])
        rows.append(probe_rows(session, text[num_rows:]))
        session.close()
    return torch.equal(rows[0], rows[1])
