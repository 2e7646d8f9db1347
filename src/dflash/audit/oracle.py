"""An independent answer to "what does the target say?": the model's own forward, without any state of this package.

The library's bare forward over the whole text: no cache, no mask of ours, no block, no rollback. Everything that
decoding adds can go wrong; what is left here is the library's own path. Its rounding noise is measured, too, by
feeding the same text with different ends: a difference between two tokens that is smaller than the noise is a tie
that rounding may decide, a larger one is not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dflash.core.engine import Engine
from dflash.core.reference import FloatArray
from dflash.registry import ORACLES, load_attribute

NOISE_FACTOR = 8.0
"""Noise is the largest difference seen in a few forwards; others may differ more, and two logits are compared."""
EPSILONS = 32.0
"""Allowance in units of the last place of the largest logit, where no noise was seen at all."""


class Oracle(Protocol):
    """What the target says, computed without the code that is audited."""

    def logits(self, ids: Sequence[int], num_rows: int) -> FloatArray:
        """Logits [num_rows, V] after the last `num_rows` tokens of `ids`."""
        ...

    def tolerance(self, ids: Sequence[int], num_rows: int) -> float:
        """Largest distance of two logits after such texts that rounding may turn round."""
        ...


class BareModel(ABC):
    """The oracle of a model of some library: subclasses run its forward."""

    epsilon: float
    """Distance from 1 to the next number of the model's dtype."""

    @abstractmethod
    def logits(self, ids: Sequence[int], num_rows: int) -> FloatArray:
        """Logits [num_rows, V] of one forward over all of `ids`."""

    def tolerance(self, ids: Sequence[int], num_rows: int) -> float:
        """NOISE_FACTOR times the largest change of a logit when the text behind its row is cut differently."""
        whole = self.logits(ids, num_rows)
        noise = 0.0
        for cut in sorted({1, num_rows // 3, num_rows // 2, num_rows - 1} - {0, num_rows, len(ids)}):
            rows = num_rows - cut
            if rows > 0:
                noise = max(noise, float(np.abs(self.logits(ids[:-cut], rows) - whole[:rows]).max()))
        return NOISE_FACTOR * noise + EPSILONS * self.epsilon * float(np.abs(whole).max())


def open_oracle(engine: Engine) -> Oracle:
    """The oracle of an engine's target. Raises ConfigError for one that decodes otherwise than its bare model."""
    oracle: Oracle = load_attribute(ORACLES[engine.backend])(engine.target)
    return oracle
