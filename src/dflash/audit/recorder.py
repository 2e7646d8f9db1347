"""An engine's target with every layer's output recorded, for comparing states layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash.core.engine import Engine, TargetSession
from dflash.core.reference import FloatArray


class LayerRecorder:
    """Implements `dflash.audit.states.Recorder` on the target of an engine; `close` takes off what it put on it."""

    def __init__(self, engine: Engine, *, exact: bool, exact_width: int | None = None) -> None:
        """`exact`: `key_lengths` keys and at least `exact_width` rows per forward (None: as the engine has)."""
        self.layer_kinds: Sequence[str] = engine.target.layer_kinds
        self.vocab_size = engine.target.vocab_size
        self._num_layers = engine.target.num_layers
        self._target = engine.target.with_taps(range(self._num_layers), exact_width=exact_width)
        self._exact = exact
        self._as_numpy = engine.as_numpy

    def session(self) -> TargetSession:
        """A fresh session."""
        return self._target.session(exact=self._exact)

    def layers(self, features: Any) -> FloatArray:
        """[rows, layers, hidden] of features [rows, layers x hidden]."""
        return self._as_numpy(features).reshape(len(features), self._num_layers, -1)

    def logits(self, logits: Any) -> FloatArray:
        """float32 on the host."""
        return self._as_numpy(logits)

    def close(self) -> None:
        """Leave the engine's target as it was."""
        self._target.close()
