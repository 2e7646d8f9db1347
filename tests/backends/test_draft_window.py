"""The draft window: what the draft sees, and that no token of the text depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash import Drafting
from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.drafters.block import BlockSession
from dflash.backends.torch.drafters.dflash import DFlashDrafter
from dflash.backends.torch.target import TorchTarget
from dflash.core.draft_config import LayerAttention
from dflash.errors import ConfigError
from tests.backends.pairs import GREEDY, PROMPTS, SAMPLED, OpenEngine
from tests.backends.test_dflash_drafter import MASK, draft
from tests.backends.tiny_targets import llama, tokens

PROMPT, ANCHOR = 40, 7


def session_of(network: DraftModel, target: TorchTarget) -> tuple[BlockSession, torch.Tensor]:
    """A session that has seen the prompt, and the prompt's features."""
    session = DFlashDrafter(network, target).session()
    features = target.session().prefill(tokens(PROMPT)).features
    session.observe(tokens(PROMPT), features)
    return session, features


@pytest.mark.parametrize("window", [1, 9, PROMPT - 1, PROMPT, 1000])
@pytest.mark.parametrize("causal", [False, True])
@torch.inference_mode()
def test_full_layers_see_the_newest_rows_and_no_other(window: int, causal: bool) -> None:
    """The slow reference hides the other rows by the mask of training. Fault: a window that is one row off, moves the
    positions, or cuts into the block's own rows."""
    target = TorchTarget(llama(), taps=(0, 2))
    network = draft(target.model, layer_attention=(LayerAttention(causal=causal), LayerAttention()))
    session, features = session_of(network, target)
    everything = session._hidden(ANCHOR).clone()
    session.limit_context(window)
    contexts = network.project_context(features[None], torch.arange(PROMPT)[None])
    hidden = torch.arange(PROMPT) < PROMPT - window
    bias = torch.zeros(1, 1, PROMPT).masked_fill(hidden, float("-inf"))
    ids = torch.tensor([[[ANCHOR, *[MASK] * (network.config.block_size - 1)]]])
    reference = network(target.embed_tokens(ids), torch.tensor([[PROMPT]]), contexts, bias)[0, 0, 1:]
    torch.testing.assert_close(session._hidden(ANCHOR), reference, atol=1e-4, rtol=1e-4)
    assert torch.allclose(reference, everything, atol=1e-3) == (window >= PROMPT)


@torch.inference_mode()
def test_layers_with_a_window_keep_it() -> None:
    """Fault: the option widens or narrows windows that the draft was trained with."""
    target = TorchTarget(llama(), taps=(0, 2))
    network = draft(target.model, layer_attention=(LayerAttention(window=12),) * 2)
    session, _ = session_of(network, target)
    before = session._hidden(ANCHOR).clone()
    session.limit_context(3)
    torch.testing.assert_close(session._hidden(ANCHOR), before)


def test_the_text_does_not_depend_on_it(open_engine: OpenEngine, target_folder: Path, trained_folder: Path) -> None:
    """Fault: the window reaches the target, or is taken and has no effect."""
    engine = open_engine(target_folder, trained_folder)
    for params in (GREEDY, SAMPLED):
        plain = engine.generate(PROMPTS[0], params, use_draft=False)
        for fixed in (True, False):
            drafted = engine.generate(PROMPTS[0], params, drafting=Drafting(fixed=fixed, draft_window=4))
            assert drafted.token_ids == plain.token_ids
    whole, narrow = (
        engine.generate(PROMPTS[0], GREEDY, drafting=Drafting(fixed=True, draft_window=window)).stats
        for window in (10_000, 4)
    )
    assert whole.acceptance_length > narrow.acceptance_length
    with pytest.raises(ConfigError, match="at least 1"):
        engine.generate(PROMPTS[0], GREEDY, drafting=Drafting(draft_window=0))
    engine.close()


def test_without_a_context_to_limit_it_is_refused(open_engine: OpenEngine, target_folder: Path) -> None:
    """Fault: the option is accepted and has no effect."""
    engine = open_engine(target_folder, "ngram")
    with pytest.raises(ConfigError, match="leave it out"):
        engine.generate(PROMPTS[0], GREEDY, drafting=Drafting(draft_window=8))
    engine.close()
