"""The EAGLE-3 network and drafter against the slow reference (`eagle3_reference.py`), its states against fresh ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflash.backends.torch.drafters.eagle3 import Eagle3Drafter
from dflash.backends.torch.packing import PackedLinear, can_pack
from dflash.backends.torch.target import TorchTarget
from dflash.core.draft_config import Yarn
from dflash.core.draft_tensors import expected_tensors
from dflash.core.eagle3_config import Eagle3Config, Llama3Rope, llama3_frequencies
from tests.backends.eagle3_drafts import TAPS, eagle3_config, random_eagle3
from tests.backends.eagle3_reference import Reference
from tests.backends.tiny_targets import VOCAB_SIZE

SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE}
REDUCED = tuple(range(3, VOCAB_SIZE, 2))
LLAMA3 = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "the target's head": {"owns_head": False},
    "own embedding": {"owns_embedding": True},
    "reduced vocabulary": {"draft_vocab_size": len(REDUCED)},
    "biases": {"attention_bias": True},
    "head norms": {"head_norms": True},
    "normed residual": {"norm_before_residual": True},
    "one norm before fc": {"fused_norm": "whole"},
    "a norm per tap": {"fused_norm": "each"},
    "fed its normed output": {"feeds_normed": True},
    "two layers": {"num_hidden_layers": 2},
    "linear rope": {"rope_factor": 4.0},
    "llama 3 rope": {"llama3": LLAMA3, "rope_theta": 500.0},
    "neighbouring pairs": {"rope_interleaved": True},
    "two taps": {"target_layer_ids": (0, 2)},
}


def small_llama() -> LlamaForCausalLM:
    """It only lends its embedding and head."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
        )
    )


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    return TorchTarget(small_llama(), taps=TAPS)


def drafter_of(kind: str, target: TorchTarget, seed: int = 1) -> Eagle3Drafter:
    config = eagle3_config(**SIZES, **KINDS[kind])
    network = random_eagle3(config, seed, ids=REDUCED if config.draft_vocab_size else None)
    network.for_decoding()
    return Eagle3Drafter(network, target)


def reference_of(drafter: Eagle3Drafter) -> Reference:
    network = drafter.network
    return Reference(network.config, network.state_dict(), drafter.embed_VH, drafter.head_KH, network.vocabulary)


def draws(config: Eagle3Config, length: int, seed: int = 3) -> tuple[list[int], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
    return tokens, torch.randn(length, config.fc_in_features, generator=generator)


@pytest.mark.parametrize(
    ("kind", "window"), [*((kind, None) for kind in KINDS), ("plain", 5), ("two layers", 4), ("llama 3 rope", 1)]
)
def test_the_drafter_is_the_reference(kind: str, window: int | None, target: TorchTarget) -> None:
    """Fault: halves of the layer's input swapped, a residual of the wrong state, a row that sees its later ones or not
    the chain before it, positions off by one, the wrong state fed back, a norm left out, draft ids for target ids.
    Rounds accept some, all and none of what was proposed; an anchor that is asked twice, and one that is dropped, leave
    no trace; rows of a table are those of a chain that went through that candidate."""
    drafter = drafter_of(kind, target)
    session, reference, config = drafter.session(), reference_of(drafter), drafter.network.config
    text, features = draws(config, 12)
    if window is not None:
        session.limit_context(window)
    at = 0
    for step, (committed, length) in enumerate(((6, 2), (1, 3), (4, 1))):
        session.observe(text[at : at + committed], features[at : at + committed])
        at += committed
        session.propose(text[-1], 5)
        expected = reference.chain(text[:at], features[:at].double().numpy(), text[at], length, window)
        for _ in range(2):
            proposal = session.propose(text[at], length)
            assert list(proposal.tokens) == expected.tokens
            best = [float(row.max()) for row in expected.log_probs]
            assert proposal.log_probs == pytest.approx(best, abs=2e-4)
        if step != 1:
            continue
        table = session.candidates(text[at], length, 3)
        assert [ids[0] for ids in table.ids] == expected.tokens
        assert table.transitions is not None
        columns = [[reference.ids.index(token) for token in ids] for ids in table.ids]
        for slot in range(length):
            assert table.log_probs[slot] == pytest.approx(expected.log_probs[slot][columns[slot]].tolist(), abs=2e-4)
        for slot in range(1, length):
            for a, token in enumerate(table.ids[slot - 1]):
                wanted = reference.after(slot, token)[columns[slot]].tolist()
                assert table.transitions[slot - 1][a] == pytest.approx(wanted, abs=2e-4)
        assert session.propose(text[at], length).tokens == proposal.tokens


def test_the_network_has_the_tensors_that_are_checked() -> None:
    """Fault: a part that is checked and not loaded, or the other way round."""
    for kind, changes in KINDS.items():
        network = random_eagle3(eagle3_config(**SIZES, **changes))
        shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
        assert shapes == dict(expected_tensors(network.config)), kind


def test_a_head_is_packed_once(target: TorchTarget) -> None:
    """Fault: the head of a large vocabulary is copied for the network and again for the drafter that scores with it."""
    drafter = drafter_of("plain", target)
    own = next(kind for kind in KINDS if KINDS[kind].get("owns_head", True))
    assert type(drafter_of(own, target).network.lm_head) is torch.nn.Linear
    packed = [module for module in drafter.network.modules() if isinstance(module, PackedLinear)]
    assert bool(packed) == can_pack()


def test_prompts_in_one_piece_or_many(target: TorchTarget) -> None:
    """Fault: a first observation of one token, or storage that is moved when it grows and loses rows."""
    for kind in ("plain", "two layers"):
        drafter = drafter_of(kind, target)
        text, features = draws(drafter.network.config, 1100)
        whole, pieces = drafter.session(), drafter.session()
        whole.observe(text, features)
        for start, end in ((0, 1), (1, 2), (2, 515), (515, 1100)):
            pieces.observe(text[start:end], features[start:end])
            pieces.propose(7, 5)
        expected, found = whole.propose(9, 5), pieces.propose(9, 5)
        assert found.tokens == expected.tokens
        assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


def test_sessions_share_nothing(target: TorchTarget) -> None:
    """Fault: keys and values in the shared side, so that one request reads another's."""
    drafter = drafter_of("plain", target)
    text, features = draws(drafter.network.config, 8)
    alone = drafter.session()
    alone.observe(text, features)
    expected = alone.propose(5, 5)
    first, second = drafter.session(), drafter.session()
    first.observe(text, features)
    second.observe(list(reversed(text)), features.flip(0))
    second.propose(1, 5)
    assert first.propose(5, 5) == expected


def test_scaled_frequencies_are_transformers() -> None:
    """Fault: Llama 3.1's ramp read the other way round, which costs acceptance on long texts only."""
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, rope_parameters=scaling, max_position_embeddings=131072
    )
    stretch = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    ours = torch.from_numpy(llama3_frequencies(500000.0, 128, stretch))
    theirs = LlamaRotaryEmbedding(config).inv_freq
    assert torch.allclose(ours, theirs.float(), rtol=1e-5)
    assert not torch.allclose(ours, 500000.0 ** -(torch.arange(0, 128, 2) / 128), rtol=1e-2)


def test_yarn_runs(target: TorchTarget) -> None:
    """Fault: a scaling that is described and not applied."""
    yarn = Yarn(factor=4.0, original_max_position_embeddings=8, attention_factor=1.2, beta_fast=1.0, beta_slow=0.1)
    found = []
    for changes in ({}, {"yarn": yarn}):
        drafter = Eagle3Drafter(random_eagle3(eagle3_config(**SIZES, **changes)), target)
        session = drafter.session()
        session.observe(*draws(drafter.network.config, 20))
        found.append(session.propose(5, 3).log_probs)
    assert found[0] != found[1]
