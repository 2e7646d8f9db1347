"""What a model of mlx-lm says by itself."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from dflash.audit.oracle import BareModel
from dflash.backends.mlx.target import MLXTarget
from dflash.core.reference import FloatArray
from dflash.errors import ConfigError


class MLXOracle(BareModel):
    """The oracle of an MLX target."""

    def __init__(self, target: MLXTarget) -> None:
        """Raises ConfigError for quantised keys and values."""
        if target.kv_bits is not None:
            raise ConfigError(
                "an audit compares with the bare model, which does not quantise keys and values: load without kv_bits."
            )
        self._model = target.model
        self.epsilon = float(mx.finfo(target.dtype).eps)

    def logits(self, ids: Sequence[int], num_rows: int) -> FloatArray:
        """Logits [num_rows, V] of one forward over all of `ids`."""
        output: mx.array = self._model(mx.array([list(ids)]))
        logits: FloatArray = np.array(output[0, -num_rows:].astype(mx.float32))
        return logits
