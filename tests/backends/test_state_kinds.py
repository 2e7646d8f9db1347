"""One kind of layer state at a time: what is stored after a rollback, windows over long texts, branches, masks."""

from __future__ import annotations

from contextlib import closing
from random import Random
from typing import Any

import pytest
import torch

from dflash.backends.torch.attention import AttentionForm
from dflash.backends.torch.compat import LayerSpec
from dflash.backends.torch.masks import BlockMask, SessionMasks, window_mask
from dflash.backends.torch.state import SessionCache
from dflash.backends.torch.states import KINDS
from dflash.backends.torch.states.sliding import PAGE
from dflash.backends.torch.target import TorchTarget
from dflash.types import Proposal
from tests.backends.architectures import model_of, tokens
from tests.backends.matrix import BLOCK, NEXT, PROMPT, feed

BY_KIND = {
    "window": "Mistral",
    "full and window": "Gemma 3",
    "shared": "Gemma 4",
    "latent": "DeepSeek-V3, Kimi-K2",
    "indexed": "GLM-MoE-DSA",
    "gated delta": "Qwen3.5",
    "Mamba-2": "Granite 4",
    "convolution": "LFM2",
}
TREE = Proposal.tree((7, 8, 9, 10, 11, 12, 13), (0, 1, 0, 3, 2, 3, 6))
PATHS = [(0,), (0, 3), (0, 1, 2, 5), (0, 3, 6, 7)]


@pytest.mark.parametrize("kind", BY_KIND)
def test_stored_states_equal_those_of_a_fresh_run(kind: str) -> None:
    """Fault: a state that is only right as long as nobody looks: rejected rows in a sum, a window that lost a row."""
    target = TorchTarget(model_of(BY_KIND[kind]))
    for kept in (0, 2, len(BLOCK)):
        ours, fresh = target.session(exact=False), target.session(exact=False)
        ours.prefill(PROMPT)
        feed(ours, BLOCK)
        ours.commit(range(kept))
        fresh.prefill([*PROMPT, *BLOCK[:kept]])
        states = [[t for layer in session._cache.layers for t in layer.committed()] for session in (ours, fresh)]
        assert states[0]
        for left, right in zip(*states, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    target.close()


@pytest.mark.parametrize("kind", ["window", "full and window", "shared", "indexed"])
@pytest.mark.parametrize("exact", [False, True])
def test_every_path_of_a_tree_equals_its_chain(kind: str, exact: bool) -> None:
    """Fault: the window of a branch counts rows instead of positions, commit keeps the wrong rows of a window."""
    target = TorchTarget(model_of(BY_KIND[kind]), exact_width=4)
    for path in PATHS:
        ours, chain = target.session(exact=exact), target.session(exact=exact)
        for session in (ours, chain):
            session.prefill(PROMPT)
        assert ours.supports_trees
        branch = ours.verify(5, TREE).logits[list(path)]
        torch.testing.assert_close(branch, chain.verify(5, Proposal(TREE.along(path))).logits, rtol=1e-4, atol=1e-4)
        ours.commit(path)
        chain.commit(range(len(path)))
        torch.testing.assert_close(feed(ours, NEXT), feed(chain, NEXT), rtol=1e-4, atol=1e-4)
    target.close()


def test_kinds_that_cannot_hold_branches_say_so() -> None:
    """Fault: a tree reaches a layer that would run all branches one after the other, or count rows as positions."""
    with closing(TorchTarget(model_of("Qwen3.5"))) as target:
        assert not target.session().supports_trees
    assert {name for name, kind in KINDS.items() if not kind.supports_trees} == {
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "MiniMaxM3VLSparseCacheLayer",
    }


@pytest.mark.parametrize("window", [3, 200, 700])
@pytest.mark.parametrize("exact", [False, True])
def test_a_window_over_a_long_text(window: int, exact: bool) -> None:
    """Fault: a page is dropped too early, keys shift when storage moves on, or storage grows with the text. The keys
    are their own positions; random prefills, blocks and rollbacks over many pages."""
    cache = SessionCache([LayerSpec("DynamicSlidingWindowLayer", "sliding_attention", window)])
    layer: Any = cache.layers[0]
    random = Random(window)
    longest = 0
    while cache.num_tokens < 5 * PAGE:
        start, num_rows = cache.num_tokens, random.choice([1, 5, 16, 300])
        cache.begin(num_rows, exact=exact)
        rows = torch.arange(start, start + num_rows, dtype=torch.float32)[None, None, :, None]
        keys, values = cache.update(rows, -rows, 0)
        num_keys, first = cache.get_mask_sizes(num_rows, 0)
        assert keys.shape == values.shape == (1, 1, num_keys, 1)
        oldest = max(0, start - window + 1)
        assert max(0, first) <= oldest
        seen = slice(oldest - first, start + num_rows - first)
        expected = torch.arange(oldest, start + num_rows, dtype=torch.float32)
        assert torch.equal(keys[0, 0, seen, 0], expected)
        assert torch.equal(values[0, 0, seen, 0], -expected)
        assert not exact or (num_keys % 128 == 0 and first % PAGE == 0)
        longest = max(longest, layer.keys.shape[2])
        cache.commit(range(random.randint(0, num_rows)))
        if start > 2 * PAGE:  # a rejected row that nobody overwrote must not be missed
            layer.keys[:, :, cache.num_tokens - layer._base :] = -7.0
    assert longest <= window + 3 * PAGE + 300
    kept = layer.committed()[0][0, 0, :, 0]
    assert torch.equal(kept, torch.arange(cache.num_tokens - window + 1, cache.num_tokens, dtype=torch.float32))


def session_masks(specs: list[LayerSpec]) -> SessionMasks:
    return SessionMasks(specs, torch.device("cpu"), torch.float32, AttentionForm())


@pytest.mark.parametrize("chunked", [False, True])
def test_window_masks_equal_their_definition(chunked: bool) -> None:
    """Row at position p sees key t iff it is itself, an ancestor or committed, and t > p - window (or t lies in p's
    chunk); nothing in front of the text or behind the fed rows."""
    window = 6
    for start, first, num_keys, proposal in [
        (4, 0, 9, Proposal((1, 2))),
        (20, 15, 8, Proposal((1, 2))),
        (20, -8, 40, Proposal((1, 2, 3))),
        (20, 12, 20, Proposal.tree((1, 2, 3, 4), (0, 0, 1, 1))),
    ]:
        num_rows = len(proposal.tokens) + 1
        parents = proposal.parents or tuple(range(num_rows - 1))
        ancestors = [{0}]
        for row, parent in enumerate(parents, start=1):
            ancestors.append(ancestors[parent] | {row})
        positions = [start + depth for depth in proposal.depths()]
        cache = SessionCache(
            [LayerSpec("DynamicLayer"), LayerSpec("DynamicSlidingWindowLayer", "sliding_attention", window)]
        )
        cache.begin(start, exact=False)
        cache.commit(range(start))
        cache.begin(num_rows, exact=True)
        full = BlockMask(torch.device("cpu"), torch.float32).rows(start, num_rows, cache.span.num_keys, 128)
        if proposal.parents is not None:
            both: Any = session_masks([LayerSpec("DynamicLayer")]).of(cache, num_rows, proposal)
            full = both
        mask = window_mask(full, positions, start, (num_keys, first), window, chunked=chunked)
        for row in range(num_rows):
            for column in range(num_keys):
                key = first + column
                position = key if key < start else positions[key - start] if key - start < num_rows else None
                near = position is not None and (
                    positions[row] // window == position // window if chunked else positions[row] - position < window
                )
                visible = key >= 0 and near and (key < start or key - start in ancestors[row])
                assert (mask[0, 0, row, column] == 0) == visible, (start, row, key)


def test_masks_by_kind_of_attention() -> None:
    """Fault: a model with two kinds of attention gets one mask for both, or one with a single kind a mapping that it
    does not understand."""
    full, window = LayerSpec("DynamicLayer"), LayerSpec("DynamicSlidingWindowLayer", "sliding_attention", 4)
    recurrent, shared = LayerSpec("LinearAttentionLayer", None), LayerSpec("DummyLayer", "sliding_attention")
    for specs, keys in [
        ([full, full], None),
        ([window, window], None),
        ([full, recurrent], None),
        ([full, window, shared], {"full_attention", "sliding_attention", "linear_attention", "conv"}),
    ]:
        cache = SessionCache(specs)
        cache.begin(10, exact=False)
        cache.commit(range(10))
        cache.begin(3, exact=False)
        mask = session_masks(specs).of(cache, 3, Proposal((1, 2)))
        assert (set(mask) if isinstance(mask, dict) else None) == keys
    cache = SessionCache([recurrent])
    cache.begin(3, exact=False)
    assert session_masks([recurrent]).of(cache, 3, Proposal((1, 2))) is None


def test_prompts_shorter_than_the_convolution() -> None:
    """Fault: the window of a convolution is narrower than its kernel after a short prompt."""
    for family in ("LFM2", "Kimi-Linear"):
        target = TorchTarget(model_of(family))
        text = tokens(6, seed=8)
        short, whole = target.session(exact=False), target.session(exact=False)
        short.prefill(text[:1])
        for token in text[1:]:
            step = short.verify(token, Proposal())
            short.commit(range(1))
        torch.testing.assert_close(step.logits, whole.prefill(text).logits, rtol=1e-4, atol=1e-4)
        target.close()
