"""Features of training sequences: which states they are, and the store in front of the target."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from dflash.backends.torch.target import TorchTarget
from dflash.errors import CheckpointError
from dflash.train.features import MANIFEST, CachedFeatures, OnlineFeatures, cache_gigabytes, weights_fingerprint
from tests.backends.tiny_targets import FAMILIES, llama, tokens

TAPS = (0, 2)
"""The last layer is one of them: its output is not what Transformers calls its last hidden state."""


def online(model: PreTrainedModel, taps: Sequence[int] = TAPS) -> OnlineFeatures:
    decoder = model.get_decoder()
    return OnlineFeatures(decoder, list(decoder.layers), taps)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_features_are_the_outputs_of_the_tapped_layers(family: str) -> None:
    """Guards against taps one layer off and a normed last state: z is hidden_states[z + 1], and the last
    layer's output is taken before the final norm."""
    model, ids = FAMILIES[family](), tokens(13)
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    rows = online(model, (0, 1)).features(ids)
    torch.testing.assert_close(rows, torch.cat([states[1][0], states[2][0]], dim=-1), rtol=1e-5, atol=1e-5)
    last = online(model, (2,)).features(ids)
    torch.testing.assert_close(model.get_decoder().norm(last), states[3][0], rtol=1e-5, atol=1e-5)
    assert (last - states[3][0]).abs().max() > 0.1


def test_features_equal_those_of_decoding() -> None:
    """Guards against a draft that learns from other features than it is given: chunked prefill, then a block."""
    model, ids = llama(), tokens(40)
    target = TorchTarget(model, taps=TAPS, prefill_chunk=16)
    session = target.session()
    prefilled = session.prefill(ids).features
    session.close()
    target.close()
    torch.testing.assert_close(online(model).features(ids), prefilled, rtol=1e-4, atol=1e-5)


def test_a_batch_equals_single_sequences() -> None:
    """Guards against padding that reaches real rows, or rows given to another sequence."""
    source, sequences = online(llama()), [tokens(n, seed=n) for n in (5, 12, 1, 9)]
    batch = source.batch(sequences)
    assert [len(rows) for rows in batch] == [5, 12, 1, 9]
    for ids, rows in zip(sequences, batch, strict=True):
        torch.testing.assert_close(rows, source.features(ids), rtol=1e-4, atol=1e-5)


def test_no_hooks_stay_behind() -> None:
    """Guards against a target that records on for ever, also after an error."""
    model = llama()
    source = online(model)
    source.features(tokens(4))
    with pytest.raises(IndexError):
        source.features([10**6])
    assert not any(layer._forward_hooks for layer in model.get_decoder().layers)


class Counting:
    """A source that counts its sequences."""

    def __init__(self) -> None:
        self.computed: list[tuple[int, ...]] = []

    def features(self, token_ids: Sequence[int]) -> Tensor:
        return self.batch([token_ids])[0]

    def batch(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        self.computed += [tuple(ids) for ids in sequences]
        return [torch.tensor(list(ids))[:, None] * torch.tensor([1.0, 1 / 3]) for ids in sequences]


def cached(folder: Path, source: Counting | None = None, **convention: Any) -> CachedFeatures:
    return CachedFeatures(
        source or Counting(), folder, convention={"target": "t", "weights": "w", "taps": [0, 2], **convention}
    )


def test_the_store_computes_once(tmp_path: Path) -> None:
    """Guards against recomputing what is there, mixing sequences up, and values that change on reading."""
    source = Counting()
    store = cached(tmp_path, source)
    first = store.batch([[1, 2], [3, 4, 5]])
    second = cached(tmp_path, source).batch([[3, 4, 5], [7], [1, 2]])
    assert source.computed == [(1, 2), (3, 4, 5), (7,)]
    assert torch.equal(first[0], second[2]) and torch.equal(first[1], second[0])
    assert second[1].dtype == torch.bfloat16
    assert torch.equal(store.features([1, 2]), first[0])
    assert not list(tmp_path.rglob("*.partial"))


def test_order_and_cut_are_part_of_the_key(tmp_path: Path) -> None:
    """Guards against features of a longer or reordered sequence."""
    source = Counting()
    store = cached(tmp_path, source)
    for ids in ([1, 2, 3], [1, 2], [2, 1], [1, 2, 3]):
        store.features(ids)
    assert len(source.computed) == 3


def test_another_convention_is_refused(tmp_path: Path) -> None:
    """Guards against features of other taps or of another target: they have the right shape."""
    cached(tmp_path)
    cached(tmp_path)
    for other in ({"taps": [1, 2]}, {"weights": "u"}, {"state": "normed"}):
        with pytest.raises(CheckpointError, match=f"by their {next(iter(other))}; give another data.features_folder"):
            cached(tmp_path, **other)
    cached(tmp_path, target="the same weights by another name")
    stated = json.loads((tmp_path / MANIFEST).read_text())
    assert stated["taps"] == [0, 2]
    assert "before any norm" in stated["state"]


def test_features_without_a_fingerprint_are_refused(tmp_path: Path) -> None:
    """Guards against a cache of another target of the same name, which earlier versions could not tell apart; who
    knows better is told what to write, and that works."""
    (tmp_path / MANIFEST).write_text(
        json.dumps(
            {"state": "decoder layer output, before any norm", "dtype": "bfloat16", "target": "t", "taps": [0, 2]}
        )
    )
    with pytest.raises(CheckpointError, match=r"without a fingerprint of its weights.*features_folder") as caught:
        cached(tmp_path)
    match = re.search(r'add ("weights": "\w+") to its manifest', str(caught.value))
    assert match is not None
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(manifest | json.loads(f"{{{match[1]}}}")))
    cached(tmp_path)
    (tmp_path / MANIFEST).write_text("[]")
    with pytest.raises(CheckpointError, match="damaged"):
        cached(tmp_path)


@torch.no_grad()
def test_fingerprint_of_weights() -> None:
    """Guards against a fingerprint that overlooks a single changed, moved or swapped weight, or that depends on the
    dtype in which equal weights are held."""
    model = llama()
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())
    base = weights_fingerprint(model)
    assert weights_fingerprint(llama().bfloat16()) == base
    matrix = next(weight for weight in model.parameters() if weight.ndim == 2 and weight.numel() > 4096)
    found = {base}
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda w: w.view(-1)[1234:1235].mul_(1.01),
        lambda w: w.copy_(w.flip(0)),
        lambda w: w.zero_(),
    ]
    for change in changes:
        kept = matrix.clone()
        change(matrix)
        found.add(weights_fingerprint(model))
        matrix.copy_(kept)
    assert len(found) == 4
    assert weights_fingerprint(model) == base


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[1"])
def test_a_damaged_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    """Guards against a traceback, or against trusting a folder whose convention is unknown."""
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        cached(tmp_path)


@pytest.mark.parametrize("harm", ["truncated", "empty", "header only", "zeros", "another key"])
def test_a_damaged_file_is_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str) -> None:
    """Guards against half a file that ends a run of days, or is learnt from: after a power failure the newest files may
    be short, empty or full of zeros. One warning, the same rows, and the file is whole again."""
    source = Counting()
    store = cached(tmp_path, source)
    expected = store.features([1, 2])
    (path,) = tmp_path.rglob("*.safetensors")
    data = path.read_bytes()
    other = save({"other": torch.zeros(2, 2)})
    damaged = {"truncated": data[:-3], "empty": b"", "header only": data[:20], "zeros": bytes(len(data))}
    path.write_bytes(damaged.get(harm, other))
    with caplog.at_level("WARNING", logger="dflash"):
        assert torch.equal(store.features([1, 2]), expected)
    (record,) = caplog.records
    assert path.name in record.getMessage()
    assert path.read_bytes() == data
    store.features([1, 2])
    assert len(source.computed) == 2


def test_a_file_of_another_sequence_is_refused(tmp_path: Path) -> None:
    """Guards against learning from rows that belong to other tokens: that is no accident of a power failure."""
    store = cached(tmp_path)
    store.features([1, 2])
    (path,) = tmp_path.rglob("*.safetensors")
    store.features([7, 8, 9])
    (other,) = [found for found in tmp_path.rglob("*.safetensors") if found != path]
    path.write_bytes(other.read_bytes())
    with pytest.raises(CheckpointError, match="another sequence"):
        store.features([1, 2])
    path.unlink()
    assert store.features([1, 2]).shape == (2, 2)


def test_size_on_disk(tmp_path: Path) -> None:
    """Guards against a surprise: two bytes per value, as announced before the run."""
    cached(tmp_path).features(list(range(1000)))
    (path,) = tmp_path.rglob("*.safetensors")
    assert path.stat().st_size == pytest.approx(cache_gigabytes(1000, 1, 2) * 1e9, rel=0.05)
