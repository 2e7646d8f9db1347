"""The draft network: strict loading, and training and inference forwards against a dense reference.

The reference below is written from the paper (arXiv:2602.06036 §3) on its own: one softmax per row over an explicit
list of visible keys. It shares no code with the network but its weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.backends.torch.draft_loading import load_draft
from dflash.backends.torch.draft_model import ContextKV, DraftLayer, DraftModel
from dflash.core.draft_config import CONFIG_FILE, WEIGHTS_FILE
from dflash.errors import CheckpointError
from dflash.train.mask import dense_mask
from tests.backends.tiny_pair import HIDDEN, draft_config, random_draft, save_draft

CPU = torch.device("cpu")
WIDTH = 2 * HIDDEN
"""Features of one token: two taps."""
SHAPES = [(4, 2, 8), (4, 4, 8), (6, 1, 4), (2, 2, 24)]
"""Query heads, key/value heads, head width: grouped, plain, one shared head, wider than hidden / heads."""


def network(heads: int = 4, kv_heads: int = 2, head_dim: int = 8, block_size: int = 5, seed: int = 1) -> DraftModel:
    """A random draft whose norms are not all ones, so that a forgotten or swapped norm shows."""
    config = draft_config(
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, block_size=block_size
    )
    draft = random_draft(config, seed).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in draft.named_parameters():
        if "norm" in name:
            parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return draft


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- the reference, row by row: see docs/algorithm.md and docs/training.md ------------------------------------------


_CONTEXT = -1
"""Kind of a context row; rows of block j are of kind j."""


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate one head's vector [D] to an absolute position, pair (d, d + D/2) by position * theta^(-2d/D)."""
    half = len(x) // 2
    out = x.clone()
    for d in range(half):
        angle = position * theta ** (-2 * d / len(x))
        out[d] = x[d] * math.cos(angle) - x[d + half] * math.sin(angle)
        out[d + half] = x[d + half] * math.cos(angle) + x[d] * math.sin(angle)
    return out


def heads_of(row: Tensor, weight: Tensor, norm: Tensor | None, position: int, draft: DraftModel) -> list[Tensor]:
    """Project one row and return its heads, normed and rotated if they are queries or keys."""
    config = draft.config
    heads = list((weight @ row).split(config.head_dim))
    if norm is None:
        return heads
    return [turned(rms(head, norm, config.rms_norm_eps), position, config.rope_theta) for head in heads]


def reference(draft: DraftModel, features_SF: Tensor, embedded_ABH: Tensor, anchors: Sequence[int]) -> Tensor:
    """Final normed states [A, B, H] of blocks behind the context, under the training mask (docs/training.md)."""
    config, eps = draft.config, draft.config.rms_norm_eps
    num_context, group = features_SF.shape[0], config.num_attention_heads // config.num_key_value_heads
    fused = [rms(draft.fc.weight @ row, draft.hidden_norm.weight, eps) for row in features_SF]
    x = {(j, i): embedded_ABH[j, i] for j in range(len(anchors)) for i in range(config.block_size)}
    for layer in draft.layers:
        assert isinstance(layer, DraftLayer)
        at = layer.self_attn
        u = {key: rms(row, layer.input_layernorm.weight, eps) for key, row in x.items()}
        rows = [(_CONTEXT, t, t, fused[t]) for t in range(num_context)]
        rows += [(j, i, anchors[j] + i, row) for (j, i), row in u.items()]
        keys = [heads_of(row, at.k_proj.weight, at.k_norm.weight, position, draft) for *_, position, row in rows]
        values = [heads_of(row, at.v_proj.weight, None, position, draft) for *_, position, row in rows]
        new = {}
        for (j, i), row in u.items():
            visible = [
                n for n, (kind, t, _, _) in enumerate(rows) if (kind == _CONTEXT and t < anchors[j]) or kind == j
            ]
            mixed = []
            for h, query in enumerate(heads_of(row, at.q_proj.weight, at.q_norm.weight, anchors[j] + i, draft)):
                scores = torch.stack([query @ keys[n][h // group] for n in visible]) / math.sqrt(config.head_dim)
                mixed.append(sum(p * values[n][h // group] for p, n in zip(scores.softmax(0), visible, strict=True)))
            new[j, i] = x[j, i] + at.o_proj.weight @ torch.cat([torch.as_tensor(m) for m in mixed])
        for key, row in new.items():
            v = rms(row, layer.post_attention_layernorm.weight, eps)
            gate = layer.mlp.gate_proj.weight @ v
            x[key] = row + layer.mlp.down_proj.weight @ (gate * torch.sigmoid(gate) * (layer.mlp.up_proj.weight @ v))
    out = torch.stack([rms(row, draft.norm.weight, eps) for row in x.values()])
    return out.view(len(anchors), config.block_size, -1)


def training_forward(draft: DraftModel, features_SF: Tensor, embedded_ABH: Tensor, anchors: Sequence[int]) -> Tensor:
    """The network's own training form: all blocks at once."""
    positions = torch.arange(features_SF.shape[0])[None]
    at = torch.tensor(list(anchors))[None]
    bias = torch.zeros(1, len(anchors), features_SF.shape[0]).masked_fill(positions >= at[..., None], -torch.inf)
    out: Tensor = draft(embedded_ABH[None], at, draft.project_context(features_SF[None], positions), bias)
    return out[0]


def inference_forward(
    draft: DraftModel, features_SF: Tensor, embedded_BH: Tensor, anchor: int, *, spare: bool, pieces: int = 3
) -> Tensor:
    """One block behind a cache that was filled piece by piece, as the decode loop does."""
    block = draft.config.block_size
    shape = (1, draft.config.num_key_value_heads, anchor + block, draft.config.head_dim)
    storage = [ContextKV(torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for _ in draft.layers]
    for part in torch.arange(anchor).tensor_split(pieces):
        for kept, new in zip(storage, draft.project_context(features_SF[None, part], part[None]), strict=True):
            kept.keys_NKSD[:, :, part], kept.values_NKSD[:, :, part] = new.keys_NKSD, new.values_NKSD
    end = anchor + block if spare else anchor
    contexts = [ContextKV(k[:, :, :end], v[:, :, :end], block if spare else 0) for k, v, *_ in storage]
    out: Tensor = draft(embedded_BH[None, None], torch.tensor([[anchor]]), contexts)
    return out[0, 0]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_training_forward_equals_the_reference(heads: int, kv_heads: int, head_dim: int) -> None:
    """Guards against leaks between blocks, a visible anchor feature, relative positions, and heads that read another
    group's keys. Anchors next to one another and one without any context are among them."""
    draft = network(heads, kv_heads, head_dim)
    anchors = [0, 1, 4, 5, 11]
    features, embedded = random(12, WIDTH), random(len(anchors), 5, HIDDEN, seed=1)
    expected = reference(draft, features, embedded, anchors)
    torch.testing.assert_close(training_forward(draft, features, embedded, anchors), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spare", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_inference_equals_training(heads: int, kv_heads: int, head_dim: int, spare: bool) -> None:
    """Guards against good training accuracy with poor decoding: same block, context projected piece by piece.
    Rows that are not filled yet hold NaN, so reading one shows."""
    draft = network(heads, kv_heads, head_dim)
    anchors = [1, 7, 19]
    features, embedded = random(20, WIDTH), random(3, 5, HIDDEN, seed=1)
    trained = training_forward(draft, features, embedded, anchors)
    for number, anchor in enumerate(anchors):
        inferred = inference_forward(draft, features, embedded[number], anchor, spare=spare)
        torch.testing.assert_close(inferred, trained[number], rtol=1e-4, atol=1e-5)


def test_the_dense_mask_is_what_the_network_does() -> None:
    """Guards against a definition (train/mask.py) that the network does not follow: the gradient of a block's output
    with respect to each input row is zero exactly where the mask forbids, and nowhere else."""
    draft = network(block_size=3)
    anchors = [2, 3, 7]
    features, embedded = random(9, WIDTH).requires_grad_(), random(3, 3, HIDDEN, seed=1).requires_grad_()
    mask = dense_mask(anchors, num_context=9, block_size=3)
    out = training_forward(draft, features, embedded, anchors).flatten(0, 1)
    for row in range(len(out)):
        context, blocks = torch.autograd.grad(out[row].sum(), (features, embedded), retain_graph=True)
        seen = torch.cat([context.abs().sum(-1), blocks.flatten(0, 1).abs().sum(-1)]) > 0
        np.testing.assert_array_equal(seen.numpy(), mask[row])


def test_positions_are_absolute() -> None:
    """Guards against positions that count from the cache's start: the same rows moved along give other states,
    and moving block and context together by the same distance leaves attention between them unchanged."""
    draft = network()
    features, block = random(1, 6, WIDTH), random(1, 1, 5, HIDDEN, seed=1)

    def states(context_start: int, anchor: int) -> Tensor:
        contexts = draft.project_context(features, torch.arange(context_start, context_start + 6)[None])
        out: Tensor = draft(block, torch.tensor([[anchor]]), contexts)
        return out

    torch.testing.assert_close(states(0, 6), states(100, 106), rtol=1e-4, atol=1e-4)
    assert (states(0, 6) - states(0, 7)).abs().max() > 1e-3


def test_a_batch_of_padded_sequences_equals_single_ones() -> None:
    """Guards against padding rows or the neighbour sequence leaking into a block."""
    draft = network()
    long, short = random(14, WIDTH), random(9, WIDTH, seed=3)
    embedded = random(2, 1, 5, HIDDEN, seed=1)
    padded = torch.stack([long, torch.cat([short, torch.full((5, WIDTH), 7.0)])])
    anchors = torch.tensor([[13], [8]])
    positions = torch.arange(14).expand(2, -1)
    bias = torch.zeros(2, 1, 14).masked_fill(positions[:, None] >= anchors[..., None], -torch.inf)
    both = draft(embedded, anchors, draft.project_context(padded, positions), bias)
    for row, features in enumerate((long, short)):
        single = training_forward(draft, features, embedded[row], anchors[row].tolist())
        torch.testing.assert_close(both[row], single, rtol=1e-4, atol=1e-5)


def test_far_positions_in_bfloat16() -> None:
    """Guards against rotary angles computed in bfloat16, which cannot tell position 4001 from 4000."""
    draft = network().to(torch.bfloat16)
    features = random(1, 1, WIDTH).bfloat16()
    keys = [draft.project_context(features, torch.tensor([[p]]))[0].keys_NKSD for p in (4000, 4001)]
    assert (keys[0] - keys[1]).abs().max() > 0.1


# --- strict loading ------------------------------------------------------------------------------------------------


def test_a_saved_draft_comes_back(tmp_path: Path) -> None:
    """Guards against weights that are loaded under another name or in another dtype than asked for."""
    draft = network(block_size=8)
    loaded = load_draft(save_draft(tmp_path / "draft", draft), CPU, torch.float32)
    assert loaded.config == draft.config
    assert loaded.vocabulary is None
    assert not loaded.training
    assert not any(p.requires_grad or p.is_meta for p in loaded.parameters())
    for name, value in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    half = load_draft(tmp_path / "draft", CPU, torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_tensor_names_are_those_of_published_drafts() -> None:
    """Guards against names that other engines do not know."""
    layer = [f"self_attn.{part}.weight" for part in "q_proj k_proj v_proj o_proj q_norm k_norm".split()]
    layer += [f"mlp.{part}.weight" for part in "gate_proj up_proj down_proj".split()]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{number}.{name}" for number in range(2) for name in layer}
    assert set(network().state_dict()) == expected


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder


NORM, FC, QUERY = "norm.weight", "fc.weight", "layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(QUERY), r"lacks layers\.1\.self_attn\.q_proj\.weight"),
        (lambda t: t.update(extra=torch.ones(1)), "has extra"),
        (
            lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.ones(32)}),
            "attention_bias to false, but the weights",
        ),
        (lambda t: t.update({"layers.0.self_attn.r_proj.bias": torch.ones(32)}), r"r_proj\.bias.*not part of it"),
        (lambda t: t[QUERY].fill_(torch.nan), "NaN"),
        (lambda t: t[NORM][3:4].fill_(torch.inf), r"norm\.weight holds NaN or infinity"),
        (lambda t: t.update({NORM: torch.ones(5)}), r"norm\.weight has shape \[5\], not \[32\]"),
        (lambda t: t.update({FC: torch.ones(32, 96)}), "fc reads 96 features, but 2 taps of width 32 give 64"),
        (lambda t: t.update({NORM: torch.ones(32, dtype=torch.int32)}), "not floating-point"),
    ],
)
def test_unfit_weights_are_refused(tmp_path: Path, change: Callable[[dict[str, Tensor]], object], words: str) -> None:
    """Guards against a draft with a hole or a surplus: the text stays right, only the speed is gone."""
    folder = edit(save_draft(tmp_path / "draft"), change)
    with pytest.raises(CheckpointError, match=words):
        load_draft(folder, CPU, torch.float32)


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "missing"])
def test_corrupt_files_are_refused(tmp_path: Path, damage: str) -> None:
    """Guards against a traceback from the safetensors library."""
    path = save_draft(tmp_path / "draft") / WEIGHTS_FILE
    data = path.read_bytes()
    path.write_bytes({"cut": data[: len(data) // 2], "garbage": b"x" * 999, "empty": b"", "missing": b""}[damage])
    if damage == "missing":
        path.unlink()
    with pytest.raises(CheckpointError, match=WEIGHTS_FILE):
        load_draft(tmp_path / "draft", CPU, torch.float32)


def test_weights_that_overflow_float16_are_refused(tmp_path: Path) -> None:
    """Guards against infinities made by the cast itself: the file is fine, the draft would be noise."""
    folder = edit(save_draft(tmp_path / "draft"), lambda t: t[FC][0, 0].fill_(1e6))
    load_draft(folder, CPU, torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"float16.*infinity"):
        load_draft(folder, CPU, torch.float16)


def test_the_vocabulary_is_read(tmp_path: Path) -> None:
    """Guards against a reduced head that is silently ignored, or a missing list."""
    folder = save_draft(tmp_path / "draft", random_draft(draft_config(draft_vocabulary_file="ids.json")))
    with pytest.raises(CheckpointError, match=r"ids\.json"):
        load_draft(folder, CPU, torch.float32)
    (folder / "ids.json").write_text(json.dumps([3, 5, 8]))
    assert load_draft(folder, CPU, torch.float32).vocabulary == (3, 5, 8)


def test_shape_that_contradicts_the_config(tmp_path: Path) -> None:
    """Guards against a config.json of another draft beside these weights."""
    folder = save_draft(tmp_path / "draft")
    raw = json.loads((folder / CONFIG_FILE).read_text())
    for number in (3, 10**7):  # the second must not take ten million steps to be refused
        kinds = {"layer_types": ["full_attention"] * 3} if number == 3 else {"layer_types": None}
        (folder / CONFIG_FILE).write_text(json.dumps(raw | {"num_hidden_layers": number} | kinds))
        with pytest.raises(CheckpointError, match=r"lacks layers\.2|not plausible"):
            load_draft(folder, CPU, torch.float32)
