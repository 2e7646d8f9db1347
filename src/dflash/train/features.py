"""Features of training sequences: the tapped hidden states of the frozen target, computed or remembered.

A feature row t is the concatenation of the outputs of the tapped decoder layers at position t, un-normed, in tap
order: exactly what the decode loop hands the drafter. The cached mode writes each sequence once (bfloat16
safetensors, atomic) and states its convention in a manifest; a mismatch is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash.errors import CheckpointError
from dflash.train.jsonl import write_json_atomically

MANIFEST = "manifest.json"


class FeatureSource(Protocol):
    """Gives the features [S, M * H] of a sequence of token ids."""

    def features(self, token_ids: Sequence[int]) -> Tensor: ...


class OnlineFeatures:
    """Runs the target's decoder (no head) over a whole sequence and keeps the taps only."""

    def __init__(self, decoder: nn.Module, layers: Sequence[nn.Module], taps: Sequence[int]) -> None:
        self._decoder, self._layers, self._taps = decoder, [layers[z] for z in taps], tuple(taps)
        self._device = next(decoder.parameters()).device

    @torch.inference_mode()
    def features(self, token_ids: Sequence[int]) -> Tensor:
        """[S, M * H] in the target's dtype."""
        captured: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            captured.append((output[0] if isinstance(output, tuple) else output)[0])

        handles = [layer.register_forward_hook(keep) for layer in self._layers]
        try:
            self._decoder(torch.tensor([list(token_ids)], device=self._device), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat(captured, dim=-1)


class CachedFeatures:
    """Write-through store in front of another source: one file per distinct sequence."""

    def __init__(self, source: FeatureSource, folder: Path, *, convention: dict[str, Any]) -> None:
        self._source, self._folder = source, folder
        folder.mkdir(parents=True, exist_ok=True)
        manifest = folder / MANIFEST
        convention = {"state": "decoder layer output, before any norm", "dtype": "bfloat16", **convention}
        if manifest.is_file():
            if json.loads(manifest.read_text(encoding="utf-8")) != convention:
                raise CheckpointError(
                    f"{folder} holds features of another target or other taps; give another data.features_folder."
                )
        else:
            write_json_atomically(manifest, convention)

    def features(self, token_ids: Sequence[int]) -> Tensor:
        """[S, M * H] bfloat16 values (the same whether read or just computed)."""
        digest = hashlib.sha256(torch.tensor(list(token_ids), dtype=torch.int32).numpy().tobytes()).hexdigest()[:24]
        path = self._folder / digest[:2] / f"{digest}.safetensors"
        if path.is_file():
            try:
                return load_file(path)["features"]
            except SafetensorError as error:
                raise CheckpointError(f"{path} is damaged; delete it, it will be computed again.") from error
        value = self._source.features(token_ids).to(torch.bfloat16).contiguous()
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file({"features": value.cpu()}, partial)
        partial.replace(path)
        return value


def cache_gigabytes(num_tokens: int, num_taps: int, hidden_size: int) -> float:
    """Size on disk of cached features (two bytes per value)."""
    return num_tokens * num_taps * hidden_size * 2 / 1e9
