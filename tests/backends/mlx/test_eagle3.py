"""The EAGLE-3 network and drafter on MLX against the torch ones, from the same safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")

from dflash.backends.mlx.draft_loading import load_described, load_draft  # noqa: E402
from dflash.backends.mlx.drafters.eagle3 import Eagle3Session  # noqa: E402
from dflash.backends.torch.drafters.eagle3 import Eagle3Drafter as TorchDrafter  # noqa: E402
from dflash.backends.torch.drafters.eagle3 import Eagle3Session as TorchSession  # noqa: E402
from dflash.backends.torch.target import TorchTarget  # noqa: E402
from dflash.core.draft_config import Yarn  # noqa: E402
from dflash.errors import UnsupportedModel  # noqa: E402
from dflash.registry import MLX_DRAFTERS, load_attribute  # noqa: E402
from dflash.types import CandidateTable  # noqa: E402
from tests.backends.eagle3_drafts import TAPS, eagle3_config, random_eagle3, save_eagle3, speculators  # noqa: E402
from tests.backends.mlx.test_draft_networks import MLXTargetDouble, described  # noqa: E402
from tests.backends.test_eagle3 import KINDS, REDUCED, SIZES, draws, small_llama  # noqa: E402

YARN = Yarn(factor=4.0, original_max_position_embeddings=8, attention_factor=1.2, beta_fast=1.0, beta_slow=0.1)
CASES: dict[str, dict[str, Any]] = {**KINDS, "yarn": {"yarn": YARN}}


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    return TorchTarget(small_llama().requires_grad_(False), taps=TAPS)


def sessions(kind: str, target: TorchTarget, folder: Path) -> tuple[TorchSession, Eagle3Session]:
    config = eagle3_config(**SIZES, **CASES[kind])
    network = random_eagle3(config, ids=REDUCED if config.draft_vocab_size else None)
    copy = load_described(described(network, folder), mx.float32)  # type: ignore[arg-type]
    double: Any = MLXTargetDouble(target)  # type: ignore[arg-type]
    ours: Eagle3Session = load_attribute(MLX_DRAFTERS["eagle3"])(copy, double).session()
    return TorchDrafter(network, target).session(), ours


@pytest.mark.parametrize(("kind", "window"), [*((kind, None) for kind in CASES), ("plain", 4), ("two layers", 4)])
def test_logits_and_proposals_are_those_of_torch(
    kind: str, window: int | None, target: TorchTarget, tmp_path: Path
) -> None:
    """Fault: any part of the network read otherwise; rows of a guess that stay; positions of alternatives that follow
    one another. Rounds accept some, all and none of a proposal; what is asked in between leaves no trace."""
    theirs, ours = sessions(kind, target, tmp_path)
    text, features = draws(theirs._shared.network.config, 14)
    for session in (theirs, ours):
        if window is not None:
            session.limit_context(window)
    at = 0
    for size in (5, 1, 4, 2):
        rows = features[at : at + size]
        theirs.observe(text[at : at + size], rows)
        ours.observe(text[at : at + size], mx.array(rows.numpy()))
        at += size
        compare(theirs.candidates(text[at], 4, 3), ours.candidates(text[at], 4, 3))
        assert ours.candidates(text[at], 1, 3).transitions == theirs.candidates(text[at], 1, 3).transitions == []
        expected, ids = theirs.scores(text[at])
        found, our_ids = ours.scores(text[at])
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)
        assert (ids is None and our_ids is None) or np.array_equal(ids, our_ids)  # type: ignore[arg-type]
        assert tuple(ours.propose(text[at], 5).tokens) == theirs.propose(text[at], 5).tokens
    assert ours.max_proposal == theirs.max_proposal


def compare(expected: CandidateTable, found: CandidateTable) -> None:
    assert found.ids == expected.ids
    assert np.allclose(found.log_probs, expected.log_probs, atol=2e-4)
    assert expected.transitions is not None and found.transitions is not None
    assert np.allclose(found.transitions, expected.transitions, atol=2e-4)


def test_long_prompts_in_one_piece_or_many(target: TorchTarget, tmp_path: Path) -> None:
    """Fault: a first observation of one token, or storage that is moved when it grows in the midst of a chain."""
    theirs, ours = sessions("two layers", target, tmp_path)
    text, features = draws(theirs._shared.network.config, 400)
    theirs.observe(text, features)
    for start, end in ((0, 1), (1, 2), (2, 126), (126, 255), (255, 400)):
        ours.observe(text[start:end], mx.array(features[start:end].numpy()))
        ours.propose(7, 5)
    compare(theirs.candidates(9, 5, 4), ours.candidates(9, 5, 4))


def test_a_use_that_needs_a_block_is_refused(tmp_path: Path) -> None:
    """Fault: a traceback."""
    config = eagle3_config()
    folder = save_eagle3(tmp_path / "draft", random_eagle3(config), speculators(config))
    with pytest.raises(UnsupportedModel, match="has no block"):
        load_draft(folder, mx.float32)
