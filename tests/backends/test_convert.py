"""Converted drafts: there and back is the same draft, byte for byte, and every form of it proposes the same tokens."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash.backends.torch.convert import EMBEDDING, HEAD, convert_draft
from dflash.backends.torch.draft_loading import load_draft
from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.target import TorchTarget
from dflash.core.draft_config import CONFIG_FILE, WEIGHTS_FILE, DraftConfig, LayerAttention
from dflash.core.draft_reader import read_draft
from dflash.errors import ConfigError, UnsupportedModel
from dflash.registry import DRAFTERS, load_attribute
from dflash.types import Proposal
from tests.backends.tiny_pair import HIDDEN, MASK, VOCAB, draft_config, random_draft, save_draft, save_target

KEPT = [*range(0, 200, 3), MASK]
WINDOWED = {"layer_attention": (LayerAttention(window=9), LayerAttention())}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "t")


@pytest.fixture(scope="module")
def opened(target: Path) -> TorchTarget:
    from transformers import AutoModelForCausalLM

    return TorchTarget(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), taps=(0, 2))


def draft_folder(folder: Path, **changes: Any) -> Path:
    """A z-lab draft with random weights; a vocabulary file where the config names one."""
    path = save_draft(folder, random_draft(draft_config(**changes)))
    if changes.get("draft_vocabulary_file"):
        (path / changes["draft_vocabulary_file"]).write_text(json.dumps(KEPT))
    return path


def proposals(folder: Path, opened: TorchTarget) -> list[Proposal]:
    network = load_draft(folder, torch.device("cpu"), torch.float32)
    session = load_attribute(DRAFTERS[network.config.kind])(network, opened).session()
    found = []
    for start in range(0, 40, 8):
        rows = torch.randn(8, 2 * HIDDEN, generator=torch.Generator().manual_seed(start))
        session.observe(list(range(8)), rows)
        found.append(session.propose(start + 3, 99))
    return found


@pytest.mark.parametrize("layout", ["z-lab", "speculators", "transformers"])
@pytest.mark.parametrize("vocabulary", [None, "draft_vocabulary.json"])
def test_there_and_back(layout: str, vocabulary: str | None, target: Path, opened: TorchTarget, tmp_path: Path) -> None:
    """Guards against ids shifted by one, tensors lost, or a head whose rows mean other tokens: the same description,
    the same bytes, the same proposals."""
    first = draft_folder(tmp_path / "first", draft_vocabulary_file=vocabulary)
    needed = str(target) if vocabulary and layout == "speculators" else None
    done = convert_draft(first, tmp_path / "there", layout, target=needed)
    assert proposals(tmp_path / "there", opened) == proposals(first, opened)
    assert done.added == ((HEAD,) if needed else ())
    convert_draft(tmp_path / "there", tmp_path / "back", "z-lab", target=needed)
    before, after = read_draft(first), read_draft(tmp_path / "back")
    assert (after.config, after.vocabulary) == (before.config, before.vocabulary)
    values = [load_file(folder / WEIGHTS_FILE) for folder in (first, tmp_path / "back")]
    assert values[0].keys() == values[1].keys()
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    assert read_draft(tmp_path / "there").dialect == layout
    assert "auto_map" not in json.loads((tmp_path / "there" / CONFIG_FILE).read_text())


@pytest.mark.parametrize("changes", [{}, WINDOWED])
def test_transformers_own_class_computes_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    """Guards against a file that Transformers reads and understands otherwise: its own class on it, with its own cache,
    against this network (its window counts one row more)."""
    from transformers import MuseGlimmerAssistantModel
    from transformers.cache_utils import DFlashCache

    first = draft_folder(tmp_path / "first", **changes)
    convert_draft(first, tmp_path / "there", "transformers")
    theirs: Any = MuseGlimmerAssistantModel.from_pretrained(tmp_path / "there", dtype=torch.float32).eval()
    ours = load_draft(first, torch.device("cpu"), torch.float32)
    features, block = torch.randn(1, 20, 2 * HIDDEN), torch.randn(1, 8, HIDDEN)
    cache = DFlashCache(config=theirs.config)
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(20)
    with torch.no_grad():
        positions = torch.arange(28)[None]
        expected = theirs(block, features, position_ids=positions, cache=cache).last_hidden_state
        contexts = ours.project_context(features, positions[:, :20])
        states = ours(block[None], torch.tensor([[20]]), contexts)[0]
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


def own(network: DraftModel, opened: TorchTarget, **changes: Any) -> DraftModel:
    """The same draft with frozen copies of the target's embedding and head."""
    config = dataclasses.replace(network.config, owns_embedding=True, owns_head=True, **changes)
    copy = DraftModel(config).requires_grad_(False)
    tables = {EMBEDDING: opened.embed_weight.clone(), HEAD: opened.head_weight.clone()}
    held = copy.state_dict() | network.state_dict() | tables
    copy.load_state_dict(held)
    return copy


def save_own(folder: Path, network: DraftModel) -> Path:
    from dflash.core.draft_reader import dialect_named

    write = dialect_named("speculators").write
    assert write is not None
    return save_draft(folder, network, raw=write(network.config))


def test_copies_of_the_target_are_left_out_and_others_are_not(
    target: Path, opened: TorchTarget, tmp_path: Path
) -> None:
    """Guards against a draft that silently loses an embedding or head of its own."""
    network = own(random_draft(draft_config()), opened)
    folder = save_own(tmp_path / "copies", network)
    with pytest.raises(ConfigError, match="--target"):
        convert_draft(folder, tmp_path / "x", "z-lab")
    done = convert_draft(folder, tmp_path / "plain", "z-lab", target=str(target))
    assert done.dropped == (EMBEDDING, HEAD)
    assert proposals(tmp_path / "plain", opened) == proposals(folder, opened)
    with torch.no_grad():
        assert network.lm_head is not None
        network.lm_head.weight[3, 3] += 1
    folder = save_own(tmp_path / "other", network)
    with pytest.raises(UnsupportedModel, match=r"own lm_head\.weight is not the target's"):
        convert_draft(folder, tmp_path / "y", "z-lab", target=str(target))


def test_dspark_and_dflash2_where_the_layout_has_them(opened: TorchTarget, tmp_path: Path) -> None:
    """Guards against heads that are dropped on the way."""
    spark = own(
        random_draft(draft_config()),
        opened,
        markov_rank=6,
        markov_head="gated",
        anchor_predicts=True,
        confidence_head=True,
    )
    first = save_own(tmp_path / "spark", spark)
    convert_draft(first, tmp_path / "again", "speculators")
    assert proposals(tmp_path / "again", opened) == proposals(first, opened)
    with pytest.raises(UnsupportedModel, match="no DSpark heads"):
        convert_draft(first, tmp_path / "x", "z-lab")
    second = draft_folder(tmp_path / "second", conv_kernel_size=2, conv_group_size=8, selector_rank=4, selector_top_k=5)
    convert_draft(second, tmp_path / "second again", "z-lab")
    assert proposals(tmp_path / "second again", opened) == proposals(second, opened)
    for layout in ("speculators", "transformers"):
        with pytest.raises(UnsupportedModel):
            convert_draft(second, tmp_path / layout, layout)
        assert not (tmp_path / layout).exists(), "nothing half-written stays"


def test_a_folder_that_is_in_use_is_kept(tmp_path: Path) -> None:
    """Guards against overwriting somebody's draft."""
    first = draft_folder(tmp_path / "first")
    with pytest.raises(ConfigError, match="not empty"):
        convert_draft(first, first, "z-lab")
    with pytest.raises(ConfigError, match="cannot be written"):
        convert_draft(first, tmp_path / "x", "gguf")


def test_types_are_kept(tmp_path: Path) -> None:
    """Guards against float32 drafts that come back rounded, or bfloat16 ones twice as large."""
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        network = random_draft(draft_config()).to(dtype)
        convert_draft(save_draft(tmp_path / name, network), tmp_path / f"{name} there", "transformers")
        held: dict[str, Tensor] = load_file(tmp_path / f"{name} there" / WEIGHTS_FILE)
        assert {tensor.dtype for tensor in held.values()} == {dtype}
        assert json.loads((tmp_path / f"{name} there" / CONFIG_FILE).read_text())["dtype"] == name


def test_the_tiny_pair_fits() -> None:
    """Guards against tests of a vocabulary that the draft does not have."""
    assert isinstance(draft_config(), DraftConfig)
    assert max(KEPT) < VOCAB
