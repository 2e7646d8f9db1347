"""A tiny pair on disk with a random and a trained draft, made once for all tests of the backend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.engine import TorchEngine as Engine
from dflash.core.engine import Engine as AnyEngine
from tests.backends import tiny_pair
from tests.backends.architectures import SHARED
from tests.backends.pairs import BACKENDS, GREEDY, PROMPTS, OpenEngine, PlainTexts, load_with_taps
from tests.backends.pairs import open_engine as open_torch_engine
from tests.backends.tiny_pair import random_draft, save_draft, save_target, train_draft


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What engines measure stays out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def shared_models_stay_as_they_are() -> Iterator[None]:
    """A test that leaves a target open on a shared model decides what later ones see: which ones, the order says."""
    yield
    wrapped = [
        family
        for family, model in SHARED.items()
        if any("forward" in module.__dict__ or module._forward_pre_hooks for module in model.modules())
    ]
    assert not wrapped, "close the targets that were opened on these models"


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_draft(tmp_path_factory.mktemp("draft") / "random")


@pytest.fixture(scope="session")
def trained_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that has learnt this target's greedy answers to the prompts by heart; all processes of a run of the tests
    share it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all processes
    folder = folder / "trained-draft"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            made = save_draft(folder.with_suffix(".part"), draft_that_knows(target_folder))
            made.rename(folder)
    return folder


def draft_that_knows(target_folder: Path) -> DraftModel:
    engine = open_torch_engine(target_folder, None)
    network = random_draft(tiny_pair.draft_config())
    pairs = [(engine.tokenize(prompt), engine.generate(prompt, GREEDY).token_ids) for prompt in PROMPTS]
    engine.close()
    tapped = load_with_taps(target_folder, network.config.target_layer_ids)
    train_draft(network, tapped.target, pairs)
    tapped.close()
    return network


@pytest.fixture(scope="session")
def engine(target_folder: Path, draft_folder: Path) -> Engine:
    return open_torch_engine(target_folder, draft_folder)


@pytest.fixture(scope="session", params=BACKENDS)
def open_engine(request: pytest.FixtureRequest) -> OpenEngine:
    """Opens engines of each backend in turn."""
    if request.param == "mlx":
        pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
    return BACKENDS[request.param]


@pytest.fixture(scope="module")
def trained(open_engine: OpenEngine, target_folder: Path, trained_folder: Path) -> AnyEngine:
    """An engine whose draft knows the answers to the prompts."""
    return open_engine(target_folder, trained_folder)


@pytest.fixture(scope="module")
def plain_texts(trained: AnyEngine) -> PlainTexts:
    return PlainTexts(trained)
