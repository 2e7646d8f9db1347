"""What a Transformers model says by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash.audit.oracle import BareModel
from dflash.backends.torch.target import TorchTarget
from dflash.core.reference import FloatArray


class TorchOracle(BareModel):
    """The oracle of a PyTorch target."""

    def __init__(self, target: TorchTarget) -> None:
        self._model = target.model
        self.epsilon = torch.finfo(target.dtype).eps

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], num_rows: int) -> FloatArray:
        """Logits [num_rows, V] of one forward over all of `ids`."""
        tokens = torch.tensor([list(ids)], device=self._model.device)
        output = self._model(input_ids=tokens, use_cache=False, logits_to_keep=num_rows)
        logits: FloatArray = output.logits[0, -num_rows:].float().cpu().numpy()
        return logits
