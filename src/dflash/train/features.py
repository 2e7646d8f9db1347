"""Features of training sequences: the tapped hidden states of the frozen target, computed or remembered.

A feature row t is the concatenation of the outputs of the tapped decoder layers at position t, un-normed, in tap
order: exactly what the decode loop hands the drafter. The cached mode writes each sequence once (bfloat16
safetensors, atomic) and states its convention in a manifest, a fingerprint of the target's weights included; a mismatch
is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash.errors import CheckpointError
from dflash.prepare.jsonl import write_json_atomically

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_SAMPLED = 4096
"""Values per tensor in a fingerprint, about."""


class FeatureSource(Protocol):
    """Gives features [S, M * H] of sequences of token ids."""

    def features(self, token_ids: Sequence[int]) -> Tensor:
        """Of one sequence."""
        ...

    def batch(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Of several, in their order; one forward of the target where they have to be computed."""
        ...


class OnlineFeatures:
    """Runs the target's decoder (no head) over whole sequences and keeps the taps only."""

    def __init__(self, decoder: nn.Module, layers: Sequence[nn.Module], taps: Sequence[int]) -> None:
        self._decoder, self._layers, self._taps = decoder, [layers[z] for z in taps], tuple(taps)
        self._device = next(decoder.parameters()).device

    def features(self, token_ids: Sequence[int]) -> Tensor:
        """[S, M * H] in the target's dtype."""
        return self.batch([token_ids])[0]

    @torch.inference_mode()
    def batch(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """One [S, M * H] per sequence. Shorter ones are padded behind their end, where causal attention hides it."""
        longest = max(len(ids) for ids in sequences)
        padded = torch.tensor([[*ids, *([0] * (longest - len(ids)))] for ids in sequences], device=self._device)
        captured: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            captured.append(output[0] if isinstance(output, tuple) else output)

        handles = [layer.register_forward_hook(keep) for layer in self._layers]
        try:
            self._decoder(padded, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        rows = torch.cat(captured, dim=-1)
        return [rows[number, : len(ids)] for number, ids in enumerate(sequences)]


class CachedFeatures:
    """Write-through store in front of another source: one file per distinct sequence."""

    def __init__(self, source: FeatureSource, folder: Path, *, convention: dict[str, Any]) -> None:
        """
        Args:
            source: computes what is not there.
            folder: of these features alone.
            convention: what makes them these features: taps, and the target's `weights_fingerprint`; the target's name
                is kept for people, since equal weights may go by several names.

        Raises CheckpointError for a folder of other features.
        """
        self._source, self._folder = source, folder
        folder.mkdir(parents=True, exist_ok=True)
        manifest = folder / MANIFEST
        convention = {"state": "decoder layer output, before any norm", "dtype": "bfloat16", **convention}
        if manifest.is_file():
            _check_convention(folder, _read_manifest(manifest), convention)
        else:
            write_json_atomically(manifest, convention)

    def features(self, token_ids: Sequence[int]) -> Tensor:
        """[S, M * H] bfloat16 values (the same whether read or just computed)."""
        return self.batch([token_ids])[0]

    def batch(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """One [S, M * H] per sequence; what is missing or damaged is computed together and written."""
        found = [self._read(ids) for ids in sequences]
        missing = [number for number, value in enumerate(found) if value is None]
        if missing:
            for number, value in zip(missing, self._source.batch([sequences[i] for i in missing]), strict=True):
                found[number] = value.to(torch.bfloat16).contiguous()
                self._write(sequences[number], found[number])
        return [value for value in found if value is not None]

    def _path(self, token_ids: Sequence[int]) -> Path:
        digest = hashlib.sha256(torch.tensor(list(token_ids), dtype=torch.int32).numpy().tobytes()).hexdigest()[:24]
        return self._folder / digest[:2] / f"{digest}.safetensors"

    def _read(self, token_ids: Sequence[int]) -> Tensor | None:
        path = self._path(token_ids)
        try:
            value = load_file(path)["features"]
        except FileNotFoundError:
            return None
        except (SafetensorError, KeyError) as error:  # writing is not synced: a power failure may truncate a file
            logger.warning("%s is damaged (%s) and is computed again", path, error)
            return None
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror or error}); mend its permissions."
            ) from error
        if value.ndim != 2 or value.shape[0] != len(token_ids):
            raise CheckpointError(f"{path} is of another sequence; delete it, it will be computed again.")
        return value

    def _write(self, token_ids: Sequence[int], value: Tensor | None) -> None:
        assert value is not None
        path = self._path(token_ids)
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        save_file({"features": value.cpu()}, partial)
        partial.replace(path)


def cache_gigabytes(num_tokens: int, num_taps: int, hidden_size: int) -> float:
    """Size on disk of cached features (two bytes per value)."""
    return num_tokens * num_taps * hidden_size * 2 / 1e9


def weights_fingerprint(model: nn.Module) -> str:
    """Of all weights of `model`, whatever dtype of float32 and bfloat16, device or file they come from.

    Each tensor adds its name, its shape, the exact sum of its bfloat16 bit patterns, which any changed value moves, and
    a sample of its values in their places, which tells permuted ones apart. About a second per billion weights.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        patterns = tensor.detach().to(torch.bfloat16).flatten().view(torch.int16)
        sample = patterns[:: max(1, patterns.numel() // _SAMPLED)].cpu().numpy().astype("<i2")
        digest.update(f"{name};{list(tensor.shape)};{int(patterns.sum(dtype=torch.int64))};".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()[:16]


def _check_convention(folder: Path, found: Any, convention: dict[str, Any]) -> None:
    """Raise CheckpointError unless the features in `folder` are those of `convention`."""
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder / MANIFEST} is damaged; delete the folder, or give another one.")
    keys = sorted(key for key in {*found, *convention} - {"target"} if found.get(key) != convention.get(key))
    another = "give another data.features_folder, or delete this one"
    if keys == ["weights"] and "weights" not in found:
        raise CheckpointError(
            f"{folder} holds features of '{found.get('target')}' without a fingerprint of its weights (an earlier "
            f"version wrote them); {another}, or, if they are of these very weights, add "
            f'"weights": "{convention["weights"]}" to its {MANIFEST}.'
        )
    if keys:
        raise CheckpointError(f"{folder} holds features of another kind, by their {', '.join(keys)}; {another}.")


def _read_manifest(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete the folder, or give another one.") from error
