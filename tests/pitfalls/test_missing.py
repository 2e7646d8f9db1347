"""Tests of faults that no part of the package is the natural home of: several parts must agree on them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import Gemma2Config, Gemma2ForCausalLM

from dflash.backends.torch.drafters.dflash import DFlashDrafter
from dflash.backends.torch.target import TorchTarget
from dflash.check.description import PairFacts, describe
from dflash.core.draft_config import LayerAttention
from dflash.core.draft_reader import parse_draft_config, read_draft
from dflash.core.engine_info import EngineInfo
from dflash.core.loop import speculative_rounds
from dflash.core.reference import ReferenceAcceptor, accept_sampled
from dflash.core.stopping import StopRule
from dflash.errors import CheckpointError
from dflash.resolve import Source
from dflash.types import Drafting, Proposal, SamplingParams
from tests.backends.pairs import open_engine
from tests.backends.tiny_pair import draft_config, random_draft, save_draft, save_target
from tests.backends.tiny_targets import llama, tokens
from tests.fakes import FakeDrafter, FakeTarget, random_logits, run_rounds, tokens_of

PROMPT = (3, 1, 4)


def test_the_scale_of_a_drafts_logits_changes_no_proposal() -> None:
    """Guards against proposals that are sampled from the draft's own probabilities without anybody knowing that these
    are right: logits at a quarter of their scale must give the same guesses, so that acceptance at any temperature is
    that of the arg max, p(argmax q)."""
    target = TorchTarget(llama(), taps=(0, 2))
    guesses, logits = [], []
    for multiplier in (1.0, 0.25):
        config = draft_config(vocab_size=97, hidden_size=96, mask_token_id=96, output_multiplier=multiplier)
        session = DFlashDrafter(random_draft(config).eval(), target).session()
        fed = target.session()
        session.observe(tokens(9), fed.prefill(tokens(9)).features)
        guesses.append(session.propose(5, 7).tokens)
        logits.append(session.scores(5)[0])
    target.close()
    assert guesses[0] == guesses[1]
    kept = np.isfinite(logits[0])
    np.testing.assert_allclose(logits[1][kept], logits[0][kept] / 4, rtol=1e-5)


class Cutting(FakeDrafter):
    """Proposes its guess only if that is 0."""

    def propose(self, anchor: int, budget: int) -> Proposal:
        found = super().propose(anchor, 1)
        return found if found.tokens[0] == 0 else Proposal()


def test_cutting_by_the_guess_itself_biases_nothing() -> None:
    """Guards against adaptive lengths that look at the token they cut. The target says 0 with probability 0.7. A draft
    samples from (1/2, 1/2) and its guess is verified only if it is 0: with probabilities 0 comes out at
    1/2 + 1/2 * 0.7 = 0.85. Our proposals are point masses, for which any such cut leaves 0.7."""
    p = np.array([0.7, 0.3], np.float32)
    num_samples = 2_000
    luck = np.random.default_rng(0)
    cut_of_a_sample = 0
    for draw, accept, final in luck.random((num_samples, 3)):
        drawn, q = int(draw < 0.5), np.array([0.5, 0.5], np.float32)
        verified = [drawn] if drawn == 0 else []
        found = accept_sampled(verified, [q] * len(verified), np.stack([p] * (len(verified) + 1)), [accept], final)
        cut_of_a_sample += (verified[0] if found.num_accepted else found.next_token) == 0
    assert cut_of_a_sample / num_samples == pytest.approx(0.85, abs=0.03), "the counterexample is one"

    def logits(prefix: tuple[int, ...]) -> Any:
        return np.log(p)

    guesses = luck.integers(0, 2, 10 * num_samples)
    counts = np.zeros(2)
    for seed in range(num_samples // 4):
        params = SamplingParams(max_new_tokens=5, temperature=1.0, seed=seed)

        own = guesses[10 * seed : 10 * seed + 10]
        drafter = Cutting(lambda prefix, own=own: int(own[len(prefix)]))  # type: ignore[misc]
        acceptor = ReferenceAcceptor(params, (0,))
        rounds = speculative_rounds(FakeTarget(logits), drafter, acceptor, StopRule(()), (0,), max_new_tokens=5)
        for token in tokens_of(list(rounds))[1:]:
            counts[token] += 1
    assert stats.chisquare(counts, p * counts.sum() / p.sum()).pvalue > 0.01


def test_forbidden_guesses_at_every_slot() -> None:
    """Guards against a ban that is applied to the target's own token only: the drafter guesses a banned token at every
    slot, and exactly the plain text comes out."""
    logits = random_logits(6)
    free = tokens_of(run_rounds(logits, PROMPT, SamplingParams(max_new_tokens=30)))
    banned = max(set(free), key=free.count)
    for temperature in (0.0, 0.9):
        params = SamplingParams(max_new_tokens=30, temperature=temperature, logit_bias={banned: -np.inf})
        plain = tokens_of(run_rounds(logits, PROMPT, params))
        rounds = run_rounds(logits, PROMPT, params, lambda prefix: banned)
        assert tokens_of(rounds) == plain
        assert banned not in plain
        assert all(step.num_accepted == 0 for step in rounds)


def test_options_that_do_not_exist_are_refused() -> None:
    """Guards against options that are accepted and have no effect."""
    for name in ("grammar", "response_format", "guided_json", "temprature"):
        with pytest.raises(TypeError, match=name):
            SamplingParams(**{name: "x"})  # type: ignore[arg-type]


def test_a_block_starts_where_the_target_ends(tmp_path: Path) -> None:
    """Guards against a block that is one position off after some round: in every round slot 0 must sit at the number of
    tokens that the target has been fed, whatever was accepted before."""
    whole_blocks = Drafting(fixed=True)  # so that every round with a proposal has a block of the draft
    engine = open_engine(save_target(tmp_path / "target"), save_draft(tmp_path / "draft"), drafting=whole_blocks)
    drafter: Any = engine.drafter
    starts: list[int] = []
    network = drafter.network
    hook = network.register_forward_pre_hook(lambda module, inputs: starts.append(int(inputs[1].item())))
    fed: list[int] = []
    prompt = list(range(40, 52))
    done = len(prompt)
    for event in engine.stream(prompt_ids=prompt, params=SamplingParams(max_new_tokens=20, ignore_eos=True)):
        if event.round.num_proposed:
            fed.append(done - 1)
        done += len(event.token_ids)
    hook.remove()
    engine.close()
    assert len(fed) >= 3
    assert starts[: len(fed)] == fed


def facts() -> PairFacts:
    return PairFacts(
        target="t",
        target_revision=None,
        target_class="C",
        target_states=("DynamicLayer",),
        target_vocabulary=260,
        target_hidden=32,
        template_sha256=None,
        draft="d",
        draft_revision="abc",
        draft_sha256="0" * 64,
        dialect="z-lab",
        origins={},
        mask_token="<m>",
        num_scored=259,
    )


def test_attention_is_described_layer_by_layer() -> None:
    """Guards against a description that shows the first layer's causality or window for all of them."""
    kinds = (LayerAttention(window=64, causal=True), LayerAttention(window=64, causal=True), LayerAttention())
    rows = {row.name: row.value for row in describe(draft_config(num_hidden_layers=3, layer_attention=kinds), facts())}
    assert rows["in the block"] == "layers 0-1: causal; layer 2: sees the whole block"
    assert rows["window"] == "layers 0-1: 64 tokens; layer 2: all of the context"
    assert rows["draft revision"] == "abc"
    plain = {row.name: row.value for row in describe(draft_config(), facts())}
    assert plain["in the block"] == "sees the whole block"
    assert plain["window"] == "all of the context"


def test_a_block_reads_raw_embeddings_of_a_target_that_scales_them() -> None:
    """Guards against an embedding scale that is applied twice or by chance: a Gemma target multiplies its embeddings by
    the root of its width inside; the draft's block is the raw rows times `input_embedding_scale`, in use as in the
    trainer, which takes the same function."""
    config = Gemma2Config(
        vocab_size=97, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, sliding_window=32,
        layer_types=["full_attention"] * 2,
    )  # fmt: skip
    target = TorchTarget(Gemma2ForCausalLM(config), taps=(0,))
    draft = draft_config(
        vocab_size=97, hidden_size=64, mask_token_id=96, target_layer_ids=(0,), input_embedding_scale=3.0
    )
    network = random_draft(draft).eval()
    seen: list[torch.Tensor] = []
    layers: Any = network.layers
    layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))
    session = DFlashDrafter(network, target).session()
    session.observe([1, 2, 3], target.session().prefill([1, 2, 3]).features)
    session.propose(5, 4)
    target.close()
    raw = target.embed_weight
    expected = 3.0 * raw[torch.tensor([5] + [96] * (draft.block_size - 1))]
    torch.testing.assert_close(seen[0][0, 0], expected)


@pytest.mark.parametrize(
    ("nested", "flat", "expected"), [(0.25, None, 0.25), (None, 0.25, 0.25), (0.25, 0.25, 0.25), (None, None, 1.0)]
)
def test_a_multiplier_at_either_level(nested: float | None, flat: float | None, expected: float) -> None:
    """Guards against a key that is read at one level only, and against two values of which one is taken."""
    raw = draft_config().to_json()
    values = {"output_multiplier": flat} if flat is not None else {}
    inner = {"output_multiplier": nested} if nested is not None else {}
    raw = {**raw, **values, "dflash_config": {**raw["dflash_config"], **inner}}
    assert parse_draft_config(raw, source="x").output_multiplier == expected
    if flat is not None and nested is not None:
        with pytest.raises(CheckpointError, match="output_multiplier"):
            parse_draft_config({**raw, "output_multiplier": 0.5}, source="x")


def test_code_in_a_draft_is_not_run(tmp_path: Path) -> None:
    """Guards against `auto_map` that is followed: the draft loads and decodes, and its code has left no trace."""
    trace = tmp_path / "trace"
    network = random_draft(draft_config())
    raw = network.config.to_json() | {"auto_map": {"AutoModel": "evil.Model", "AutoConfig": "evil.Config"}}
    draft = save_draft(tmp_path / "draft", network, raw=raw)
    code = f"open({str(trace)!r}, 'w').write('run')\nclass Model: pass\nclass Config: pass\n"
    for name in ("evil.py", "__init__.py", "conftest.py", "sitecustomize.py"):
        (draft / name).write_text(code)
    engine = open_engine(save_target(tmp_path / "target"), draft)
    assert (
        len(engine.generate(prompt_ids=[1, 2], params=SamplingParams(max_new_tokens=4, ignore_eos=True)).token_ids) == 4
    )
    engine.close()
    assert not trace.exists()


def test_a_record_has_revision_and_hash_of_both(tmp_path: Path) -> None:
    """Guards against figures of which nobody can tell later what ran: both models' commits and the draft's weights."""
    folder = save_draft(tmp_path / "draft")
    description = read_draft(folder)
    machine: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu", "num_threads": 2, "exactness": None}
    target = Source(name="owner/target", path=tmp_path, revision="c0ffee")
    draft = Source(name="owner/draft", path=folder, revision="f00d")
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    info = EngineInfo.of(target, draft, description, width=None, **machine)
    assert (info.target, info.target_revision) == ("owner/target", "c0ffee")
    assert (info.draft, info.draft_revision, info.draft_sha256) == ("owner/draft", "f00d", weights)
    assert (info.block_size, info.dtype) == (description.config.block_size, "bfloat16")
    # A language model that drafts has no description; plain decoding has no draft.
    assert EngineInfo.of(target, draft, None, width=None, **machine).draft_sha256 == weights
    plain = EngineInfo.of(target, None, None, width=None, **machine)
    assert (plain.draft, plain.draft_revision, plain.draft_sha256, plain.block_size) == (None,) * 4
