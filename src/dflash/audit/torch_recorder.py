"""A PyTorch target that records the output of every layer, for comparing states layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash.audit.oracle import FloatArray
from dflash.backends.torch.target import TorchTarget, TorchTargetSession


class TorchRecorder:
    """Implements `dflash.audit.states.Recorder` on the model of a loaded target; `close` takes its hooks off."""

    def __init__(self, shared: TorchTarget, *, exact: bool, exact_width: int | None = None) -> None:
        """`exact`: keys in whole buckets, at least `exact_width` rows per forward (None: as the shared target has)."""
        width = shared.exact_width if exact_width is None else exact_width
        self._target = TorchTarget(shared.model, taps=range(shared.num_layers), exact_width=width)
        self._exact = exact
        self.layer_kinds: Sequence[str] = [spec.state for spec in self._target.layer_specs]
        self.vocab_size = shared.vocab_size

    def session(self) -> TorchTargetSession:
        """A fresh session."""
        return self._target.session(exact=self._exact)

    def layers(self, features: Any) -> FloatArray:
        """[rows, layers, hidden] of features [rows, layers x hidden]."""
        layers: FloatArray = features.float().cpu().numpy().reshape(len(features), self._target.num_layers, -1)
        return layers

    def logits(self, logits: Any) -> FloatArray:
        """float32 on the host."""
        rows: FloatArray = logits.float().cpu().numpy()
        return rows

    def close(self) -> None:
        """Take the hooks off the model."""
        self._target.close()
