"""Where a new draft starts: from the target's layers, routed, or at random; and what setup derives from the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.loading import LoadedTarget, open_target
from dflash.errors import ConfigError, UnsupportedModel
from dflash.train import warm_start
from dflash.train.config import load_config
from dflash.train.setup import default_mask_id, default_taps, frozen_head, open_run
from dflash.train.vocabulary import most_frequent
from tests.backends.tiny_pair import ASSISTANT, END, HIDDEN, MASK, USER, VOCAB, draft_config
from tests.backends.tiny_targets import qwen3
from tests.train.toy import recipe


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def target_layers(model: Any) -> list[nn.Module]:
    return list(model.get_decoder().layers)


def from_target(draft: DraftModel, model: Any) -> list[str]:
    layers, ids = target_layers(model), torch.arange(50, 70)
    inputs = warm_start.attention_inputs(model, layers[-len(draft.layers) :], ids.numpy())
    features = torch.randn(20, draft.config.fc_in_features, generator=generator()) * 3
    return warm_start.start_from_target(draft, layers, model.get_decoder().norm, features, inputs, generator())


def empty(**changes: Any) -> DraftModel:
    """A network full of NaN, so that a weight nobody fills is loud."""
    draft = DraftModel(draft_config(**changes))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.fill_(torch.nan)
    return draft


def finite(draft: DraftModel) -> bool:
    return all(bool(p.isfinite().all()) for p in draft.parameters())


def test_random_start_fills_everything() -> None:
    """Guards against weights that keep whatever memory held."""
    draft = empty()
    warm_start.random_start(draft, generator())
    assert finite(draft)
    assert float(draft.fc.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    other = empty()
    warm_start.random_start(other, generator())
    assert torch.equal(other.fc.weight, draft.fc.weight), "the same seed gives the same start"


def test_target_layers_are_copied(pair: Path) -> None:
    """Guards against the wrong layers (the last ones are meant, in order), and against skipped names nobody reports."""
    model = open_target(str(pair / "target"), dtype="float32", device="cpu").model
    draft = empty()
    assert from_target(draft, model) == []
    assert finite(draft)
    source = dict(model.get_decoder().named_parameters())
    for name, parameter in draft.named_parameters():
        if name.startswith("layers.") and not name.endswith(("q_norm.weight", "k_norm.weight")):
            _, number, rest = name.split(".", 2)
            assert torch.equal(parameter, source[f"layers.{int(number) + 1}.{rest}"])
    assert torch.equal(draft.norm.weight, source["norm.weight"])


@torch.no_grad()
def test_norms_that_the_target_lacks_keep_its_temperature(pair: Path) -> None:
    """Guards against unit q/k norms on copied projections: attention would be far flatter or sharper than the
    target's. The fitted norm gives queries the size that the target's have."""
    model: Any = open_target(str(pair / "target"), dtype="float32", device="cpu").model
    draft = empty()
    from_target(draft, model)
    layers = target_layers(model)
    inputs = warm_start.attention_inputs(model, layers[-2:], torch.arange(50, 70).numpy())
    for number, rows in enumerate(inputs):
        attention = layers[number + 1].self_attn
        queries: Tensor = attention.q_proj(rows)  # type: ignore[operator, union-attr]
        fitted = draft.layers[number].self_attn.q_norm(queries.view(20, 4, 8))  # type: ignore[operator, union-attr]
        assert float(fitted.pow(2).mean()) == pytest.approx(float(queries.pow(2).mean()), rel=1e-3)


def test_norms_that_the_target_has_are_copied() -> None:
    """Guards against fitted norms where the target brings its own."""
    model: Any = qwen3()
    config = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 97, "mask_token_id": 1}
    draft = empty(**config)
    with torch.no_grad():
        model.get_decoder().layers[2].self_attn.k_norm.weight.copy_(torch.arange(24.0))
    assert from_target(draft, model) == []
    assert draft.layers[1].self_attn.k_norm.weight.tolist() == list(range(24))  # type: ignore[union-attr, operator]


def test_what_does_not_fit_is_reported(pair: Path) -> None:
    """Guards against a start that claims to come from the target but is random: other head counts, other widths."""
    model = open_target(str(pair / "target"), dtype="float32", device="cpu").model
    draft = empty(num_key_value_heads=4, intermediate_size=40)
    skipped = from_target(draft, model)
    assert finite(draft)
    parts = ["self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert sorted(skipped) == sorted(f"layers.{n}.{part}.weight" for n in range(2) for part in parts)


@torch.no_grad()
def test_fusion_passes_the_deepest_tap_through(pair: Path) -> None:
    """Guards against taps of very different size drowning one another: each block is scaled to its tap."""
    draft = empty()
    model = open_target(str(pair / "target"), dtype="float32", device="cpu").model
    features = torch.randn(50, 2, HIDDEN, generator=generator()) * torch.tensor([[[100.0], [0.01]]])
    layers = target_layers(model)
    inputs = warm_start.attention_inputs(model, layers[-2:], torch.arange(50, 70).numpy())
    warm_start.start_from_target(draft, layers, model.get_decoder().norm, features.flatten(1), inputs, generator())
    fused = draft.fc(features.flatten(1))
    deepest = features[:, 1] / 0.01
    assert float(torch.cosine_similarity(fused, deepest).mean()) > 0.9
    assert 0.8 < float(fused.detach().pow(2).mean().sqrt()) < 1.3


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_routed_start(pair: Path, kv_heads: int) -> None:
    """Guards against holes for some shapes, and shows the point of it: mask slots attend to the anchor row far more
    than they would by chance."""
    model: Any = open_target(str(pair / "target"), dtype="float32", device="cpu").model
    embed: Tensor = model.get_input_embeddings().weight.detach()
    draft = empty(num_key_value_heads=kv_heads)
    features = [torch.randn(60, 2 * HIDDEN, generator=generator()) for _ in range(3)]
    ids = torch.arange(250)
    warm_start.start_routed(draft, features, embed, ids, model.get_decoder().norm.weight, generator())
    assert finite(draft)
    blocks = torch.full((1, 1, 8), MASK)
    blocks[..., 0] = 77
    contexts = draft.project_context(features[0][None], torch.arange(60)[None])
    slots: dict[int, Tensor] = {}
    for anchor in (77, 78):
        blocks[..., 0] = anchor
        slots[anchor] = draft(embed[blocks], torch.tensor([[60]]), contexts)[0, 0, 1:].detach()
    plain = empty(num_key_value_heads=kv_heads)
    warm_start.random_start(plain, generator())
    base = plain.project_context(features[0][None], torch.arange(60)[None])
    moved = []
    for network, context in ((draft, contexts), (plain, base)):
        states = []
        for anchor in (77, 78):
            blocks[..., 0] = anchor
            states.append(network(embed[blocks], torch.tensor([[60]]), context)[0, 0, 1:])
        size = states[0].pow(2).mean().sqrt()
        moved.append(float(((states[0] - states[1]).pow(2).mean().sqrt() / size).detach()))
    assert moved[0] > 3 * moved[1], "another anchor must move the mask slots' states"


def test_layers_without_the_usual_names() -> None:
    """Guards against an attribute error for a target of another build."""
    with pytest.raises(UnsupportedModel, match=r"network\.start"):
        warm_start.attention_inputs(qwen3(), [nn.Linear(2, 2)], torch.arange(3).numpy())


# --- what setup derives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "count", "expected"),
    [
        (30, 5, (1, 8, 14, 21, 28)),
        (30, 1, (28,)),
        (3, 5, (0, 1)),
        (3, 3, (0, 1)),
        (2, 1, (0,)),
        (1, 2, (0,)),
        (12, 2, (1, 10)),
    ],
)
def test_default_taps(num_layers: int, count: int, expected: tuple[int, ...]) -> None:
    """Guards against taps outside the target or twice, and against the last layer: engines hand it on differently."""
    assert default_taps(num_layers, count) == expected


def loaded(folder: Path) -> LoadedTarget:
    return open_target(str(folder / "target"), dtype="float32", device="cpu")


def test_default_mask_id(pair: Path) -> None:
    """Guards against a mask id that occurs in texts or ends answers."""
    target = loaded(pair)
    assert default_mask_id(target, frozenset()) == MASK
    assert default_mask_id(target, frozenset({MASK})) == ASSISTANT
    with pytest.raises(ConfigError, match="mask_token_id"):
        default_mask_id(target, frozenset({MASK, ASSISTANT, USER}))


@pytest.mark.parametrize("mask", [END, 98, VOCAB, -1])
def test_mask_ids_that_cannot_work(pair: Path, tmp_path: Path, mask: int) -> None:
    """Guards against a mask that is the end token, occurs in the data, or does not exist."""
    with pytest.raises(ConfigError, match=f"mask_token_id {mask}"):
        open_run(load_config(recipe(pair, tmp_path / "run", network={"mask_token_id": mask})))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network": {"num_layers": 4}}, "num_layers 4"),
    ],
)
def test_shapes_that_the_target_cannot_give(pair: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """Guards against a crash after minutes of loading, or at the first step."""
    with pytest.raises(ConfigError, match=words):
        open_run(load_config(recipe(pair, tmp_path / "run", **changes)))


def test_frozen_head_of_a_reduced_vocabulary(pair: Path) -> None:
    """Guards against labels that point at another token's row."""
    model = loaded(pair).model
    draft = empty()
    draft.vocabulary = (3, 7, 200)
    head = frozen_head(model, draft)
    full: Any = model.get_output_embeddings()
    assert torch.equal(head.head_KH, full.weight[[3, 7, 200]])
    assert head.row_of_token_V[[3, 7, 200, 4]].tolist() == [0, 1, 2, -1]
    assert int((head.row_of_token_V >= 0).sum()) == 3


def test_the_vocabulary_holds_the_most_frequent_tokens() -> None:
    """Guards against an order by id, ties that change from run to run, and a missing end token."""
    answers = [[5, 5, 5, 9, 9, 2], [9, 8, 3, 3]]
    assert most_frequent(answers, 2) == [5, 9]
    assert most_frequent(answers, 3) == [3, 5, 9]
    assert most_frequent(answers, 3, always=[40]) == [5, 9, 40]
    assert most_frequent(answers, 99, always=[40]) == [2, 3, 5, 8, 9, 40]


def test_heads_of_the_target_stay_frozen(pair: Path, tmp_path: Path) -> None:
    """Guards against an optimizer that changes the target."""
    run = open_run(load_config(recipe(pair, tmp_path / "run")))
    assert not any(p.requires_grad for p in run.target.model.parameters())
    assert all(p.requires_grad for p in run.network.parameters())
