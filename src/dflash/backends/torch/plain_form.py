"""Which kernels make a plain step fastest on this machine? A short measurement at load.

Every speed-up is divided by plain decoding in its fastest form: one row per forward, unpadded. With packed weights
(packing.py) that row can run on either copy, and which one wins depends on processor, threads and layer sizes, so it is
timed with the model that will decode. Knows nothing of drafts; exact decoding does not ask, it always runs packed.
"""

from __future__ import annotations

import time

from transformers import PreTrainedModel

from dflash.backends.torch.packing import kernel_choice
from dflash.backends.torch.target import TorchTarget
from dflash.types import Clock, Proposal

CONTEXT_TOKENS = 16
LEAST_PAIRS, MOST_PAIRS = 2, 8
"""Timed steps of each kind."""
SECONDS = 1.0
"""No further pair is begun after so long: large models take fewer."""


def packed_steps_are_faster(model: PreTrainedModel, *, clock: Clock = time.perf_counter) -> bool:
    """Whether a plain step of `model` is faster on its packed weights; False if nothing is packed.

    Steps of both kinds alternate, so that a machine that slows down favours neither, and the fastest of each count:
    whatever disturbs a step only makes it slower.

    Args:
        model: as it will decode, with the present number of threads.
        clock: seconds; replaced in tests.
    """
    if kernel_choice(model) is None:
        return False
    targets = [TorchTarget(model, packs_single=packs_single) for packs_single in (False, True)]
    sessions = [target.session(exact=False) for target in targets]
    best = [float("inf"), float("inf")]
    try:
        for session in sessions:
            session.prefill([0] * min(CONTEXT_TOKENS, session.max_length - 1))
            session.verify(0, Proposal())  # allocates and warms up; what is never committed is forgotten
        begun = clock()
        for pair in range(MOST_PAIRS):
            if pair >= LEAST_PAIRS and clock() - begun > SECONDS:
                break
            for index, session in enumerate(sessions):
                started = clock()
                session.verify(0, Proposal())
                best[index] = min(best[index], clock() - started)
    finally:
        for session, target in zip(sessions, targets, strict=True):
            session.close()
            target.close()
    return best[1] < best[0]
