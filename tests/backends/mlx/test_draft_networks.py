"""Every kind of draft network and drafter against the torch ones, from the same safetensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

mx = pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")

from dflash.backends.mlx.draft_loading import load_described  # noqa: E402
from dflash.backends.mlx.drafters.block import BlockSession  # noqa: E402
from dflash.backends.mlx.drafters.dflash import DFlashSession  # noqa: E402
from dflash.backends.mlx.drafters.dspark import DSparkSession  # noqa: E402
from dflash.backends.torch.draft_model import DraftModel as TorchDraftModel  # noqa: E402
from dflash.backends.torch.drafters.dspark import DSparkSession as TorchDSparkSession  # noqa: E402
from dflash.core.draft_config import WEIGHTS_FILE, DraftConfig  # noqa: E402
from dflash.core.draft_reader import DraftDescription  # noqa: E402
from dflash.core.safetensors_files import stored_tensors  # noqa: E402
from dflash.errors import CheckpointError  # noqa: E402
from dflash.registry import DRAFTERS, MLX_DRAFTERS, load_attribute  # noqa: E402
from dflash.types import CandidateTable  # noqa: E402
from tests.backends.test_draft_networks import (  # noqa: E402
    BACKBONES,
    BASE,
    BLOCK,
    CONFIDENT,
    CONVOLVED,
    OWN,
    SELECTING,
    SPARK,
    H,
    network,
)
from tests.backends.tiny_targets import VOCAB_SIZE, tokens  # noqa: E402

HEADS: dict[str, dict[str, Any]] = {
    "dflash2": CONVOLVED | SELECTING,
    "vanilla": SPARK | CONFIDENT,
    "gated": SPARK | {"markov_head": "gated", "confidence_head": True},
    "rnn": SPARK | {"markov_head": "rnn"},
    "own embedding and head": OWN,
    "own head of a part": OWN | {"draft_vocab_size": 40},
    "spark with own head of a part": OWN | SPARK | {"draft_vocab_size": 40},
    "multiplier and cap": {"output_multiplier": 0.5, "final_logit_softcapping": 2.0},
}
CASES = BACKBONES | HEADS


class Target:
    """Embedding and head of a made-up target, for both backends."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.embed_weight = torch.randn(VOCAB_SIZE, H, generator=generator)
        self.head_weight = torch.randn(VOCAB_SIZE, H, generator=generator)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head_weight.T


class MLXTargetDouble:
    """The same, as the MLX drafters ask for it."""

    def __init__(self, target: Target) -> None:
        self._embed = mx.array(target.embed_weight.numpy())
        self._head = mx.array(target.head_weight.numpy())

    def embed_tokens(self, ids: Any) -> Any:
        return self._embed[ids]

    def head(self, hidden: Any) -> Any:
        return hidden @ self._head.T

    def head_rows(self, ids: Any) -> Any:
        return self._head[ids]


def described(draft: TorchDraftModel, folder: Path) -> DraftDescription:
    """What the reader would say of these weights on disk."""
    save_file({name: value.contiguous() for name, value in draft.state_dict().items()}, folder / WEIGHTS_FILE)
    stored = stored_tensors(folder)
    return DraftDescription(
        config=draft.config,
        dialect="test",
        origins={},
        notes=(),
        tensors=stored,
        stored_names={name: name for name in stored},
        vocabulary=draft.vocabulary,
    )


def sessions(config: DraftConfig, folder: Path, vocabulary: tuple[int, ...] | None) -> tuple[Any, BlockSession]:
    draft = network(config)
    draft.vocabulary = vocabulary
    target = Target()
    theirs = load_attribute(DRAFTERS[config.kind])(draft, target)
    copy = load_described(described(draft, folder), mx.float32)
    ours = load_attribute(MLX_DRAFTERS[config.kind])(copy, MLXTargetDouble(target))
    return theirs.session(), ours.session()


@pytest.mark.parametrize("case", CASES)
def test_states_logits_and_proposals_are_those_of_torch(case: str, tmp_path: Path) -> None:
    """Guards against every difference in windows, causality, sinks, rotary, convolution, heads or vocabulary: over a
    context that grows past the windows in uneven pieces, hidden states and logits of each block agree in float32, and
    so do the proposals."""
    config = dataclasses.replace(BASE, **CASES[case])
    vocabulary = tuple(range(0, 80, 2)) if config.draft_vocab_size else None
    theirs, ours = sessions(config, tmp_path, vocabulary)
    features = torch.randn(40, 2 * H, generator=torch.Generator().manual_seed(9))
    start, num_same = 0, 0
    for size in (5, 1, 7, 4, 12, 1, 10):
        rows = features[start : start + size]
        theirs.observe(tokens(size), rows)
        ours.observe(tokens(size), mx.array(rows.numpy()))
        start += size
        anchor = 11 + start
        with torch.inference_mode():
            hidden = theirs._hidden(anchor)
            logits = theirs._logits(hidden)
        mine = ours._hidden(anchor)
        np.testing.assert_allclose(np.array(mine), hidden.numpy(), rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(np.array(ours._shared.logits(mine)), logits.numpy(), rtol=2e-4, atol=2e-3)
        expected = tuple(theirs.propose(anchor, BLOCK).tokens)
        proposal = ours.propose(anchor, BLOCK)
        assert len(proposal.tokens) == len(expected) == config.max_proposal
        num_same += tuple(proposal.tokens) == expected
        assert tuple(ours.propose(anchor, 2).tokens) == expected[:2]
        same_table(theirs.candidates(anchor, BLOCK, 3), ours.candidates(anchor, BLOCK, 3))
        if isinstance(ours, DSparkSession) and isinstance(theirs, TorchDSparkSession):
            np.testing.assert_allclose(
                ours.confidences(anchor, expected), theirs.confidences(anchor, expected), rtol=1e-3, atol=1e-4
            )
    assert num_same == 7


def same_table(expected: CandidateTable, found: CandidateTable) -> None:
    """The same candidates in the same order, unless two are equally likely, with the same chances."""
    np.testing.assert_allclose(found.log_probs, expected.log_probs, rtol=1e-3, atol=1e-3)
    assert [ids[0] for ids in found.ids] == [ids[0] for ids in expected.ids]
    same = [mine == theirs for mine, theirs in zip(map(tuple, found.ids), map(tuple, expected.ids), strict=True)]
    assert sum(same) >= len(same) - 1
    if not expected.transitions:
        assert not found.transitions
    elif all(same):
        assert found.transitions is not None
        np.testing.assert_allclose(found.transitions, expected.transitions, rtol=2e-3, atol=2e-3)


def test_scores_are_the_logits_and_their_ids(tmp_path: Path) -> None:
    """Guards against a check that fits temperatures to rows of other tokens."""
    theirs, ours = sessions(BASE, tmp_path, (3, 5, 8, 13, 21, BASE.mask_token_id))
    features = torch.randn(9, 2 * H, generator=torch.Generator().manual_seed(2))
    theirs.observe(tokens(9), features)
    ours.observe(tokens(9), mx.array(features.numpy()))
    assert isinstance(ours, DFlashSession)
    (expected, expected_ids), (found, ids) = theirs.scores(4), ours.scores(4)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-3)
    assert ids is not None
    assert ids.tolist() == expected_ids.tolist() == [3, 5, 8, 13, 21]


@pytest.mark.parametrize("case", ["plain", *[name for name in BACKBONES if "window" in name or "causal" in name]])
@pytest.mark.parametrize("window", [1, 9, 1000])
def test_the_draft_window_is_that_of_torch(case: str, window: int, tmp_path: Path) -> None:
    """Guards against a window that is one row off, moves positions, widens the windows a draft was trained with, or
    loses rows that it still needs when its storage moves up; over a context much longer than the window."""
    config = dataclasses.replace(BASE, **BACKBONES.get(case, {}))
    theirs, ours = sessions(config, tmp_path, None)
    theirs.limit_context(window)
    ours.limit_context(window)
    features = torch.randn(330, 2 * H, generator=torch.Generator().manual_seed(9))
    start = 0
    for size in (5, 1, 150, 4, 100, 70):
        rows = features[start : start + size]
        theirs.observe(tokens(size), rows)
        ours.observe(tokens(size), mx.array(rows.numpy()))
        start += size
        with torch.inference_mode():
            hidden = theirs._hidden(start % 90)
        np.testing.assert_allclose(np.array(ours._hidden(start % 90)), hidden.numpy(), rtol=5e-4, atol=5e-4)
    if window < 300:
        capacity = max(state.arrays()[0].shape[2] for state in ours._states)
        assert capacity <= 2 * 256, "rows that no block can see any more are kept"


def test_a_part_of_the_targets_head(tmp_path: Path) -> None:
    """Guards against ids and rows of a draft vocabulary that are mixed up; the mask id is no candidate."""
    theirs, ours = sessions(BASE, tmp_path, (3, 5, 8, 13, 21, 34, 55, 89, BASE.mask_token_id))
    features = torch.randn(9, 2 * H, generator=torch.Generator().manual_seed(2))
    theirs.observe(tokens(9), features)
    ours.observe(tokens(9), mx.array(features.numpy()))
    for anchor in range(5):
        proposal = tuple(ours.propose(anchor, BLOCK).tokens)
        assert proposal == tuple(theirs.propose(anchor, BLOCK).tokens)
        assert set(proposal) <= {3, 5, 8, 13, 21, 34, 55, 89}


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_weights_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    """Guards against a draft that loads and proposes noise; 1e30 is finite, but not in float16."""
    draft = network(BASE)
    with torch.no_grad():
        draft.norm.weight[3] = value
    with pytest.raises(CheckpointError, match=r"norm.weight.* holds NaN or infinity"):
        load_described(described(draft, tmp_path), mx.float16)
