"""The target adapter against the bare Transformers model: logits, features, refusals, isolation of sessions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel

from dflash.backends.torch import compat
from dflash.backends.torch.masks import BlockMask
from dflash.backends.torch.taps import TapRecorder
from dflash.backends.torch.target import TorchTarget
from dflash.core.protocols import Target
from dflash.errors import MissingExtra, PairError, PromptError, UnsupportedModel
from dflash.types import Proposal
from tests.backends.tiny_targets import FAMILIES, MAX_LENGTH, NUM_LAYERS, VOCAB_SIZE, llama, tokens

PROMPT = tokens(20)
BLOCK = tokens(5, seed=1)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return FAMILIES[request.param]()


@torch.no_grad()
def reference(model: PreTrainedModel, ids: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits [len(ids), V] and the un-normed output [len(ids), H] of every layer, by Transformers without a cache.

    The library replaces the last entry of its hidden states by the normed one, so the last layer's output is taken
    from the input of the final norm.
    """
    last: list[torch.Tensor] = []
    norm = model.get_decoder().norm
    handle = norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    output = model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    handle.remove()
    layers = [*output.hidden_states[1:-1], last[0]]
    return output.logits[0], [layer[0] for layer in layers]


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_prefill_in_chunks_equals_one(model: PreTrainedModel) -> None:
    """Fault: a chunk sees the wrong keys, positions restart per chunk, or feature rows are lost between chunks.
    Chunk 7 leaves a short last chunk, chunk 20 none."""
    logits, layers = reference(model, PROMPT)
    features = torch.cat([layers[0], layers[2]], dim=-1)
    for chunk in (1, 7, 20, 512):
        session = TorchTarget(model, taps=(0, 2), prefill_chunk=chunk).session()
        verdict = session.prefill(PROMPT)
        assert verdict.logits.shape == (1, VOCAB_SIZE)
        close(verdict.logits[0], logits[-1])
        close(verdict.features, features)
        close(session.verify(BLOCK[0], Proposal()).logits[0], reference(model, [*PROMPT, BLOCK[0]])[0][-1])


@pytest.mark.parametrize(("exact", "exact_width"), [(False, 1), (True, 1), (True, 3), (True, 8)])
def test_verify_equals_the_bare_model(model: PreTrainedModel, exact: bool, exact_width: int) -> None:
    """Fault: padding rows are seen or returned, the mask is off by one, positions are wrong. Every width 1..5."""
    target = TorchTarget(model, taps=(1,), exact_width=exact_width)
    session = target.session(exact=exact)
    session.prefill(PROMPT)
    logits, layers = reference(model, [*PROMPT, *BLOCK])
    for width in range(1, len(BLOCK) + 1):
        verdict = session.verify(BLOCK[0], Proposal(tuple(BLOCK[1:width])))
        assert verdict.logits.shape == (width, VOCAB_SIZE)
        rows = slice(len(PROMPT), len(PROMPT) + width)
        close(verdict.logits, logits[rows])
        close(verdict.features, layers[1][rows])


def test_taps_are_layer_outputs(model: PreTrainedModel) -> None:
    """Fault: z / z+1 confusion, or the last tap comes out normed or not at all."""
    for taps in ([0], [NUM_LAYERS - 1], [0, 1, 2], [2, 0]):
        session = TorchTarget(model, taps=taps, exact_width=4).session()
        _, layers = reference(model, [*PROMPT, *BLOCK])
        expected = torch.cat([layers[tap] for tap in taps], dim=-1)
        close(session.prefill(PROMPT).features, expected[: len(PROMPT)])
        verdict = session.verify(BLOCK[0], Proposal(tuple(BLOCK[1:])))
        close(verdict.features, expected[len(PROMPT) :])


def test_taps_equal_transformers_hidden_states() -> None:
    """The convention itself: tap z = hidden_states[z + 1] for every layer but the last, whose entry is normed."""
    model = llama()
    features = TorchTarget(model, taps=range(NUM_LAYERS)).session().prefill(PROMPT).features
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([PROMPT]), output_hidden_states=True, use_cache=False).hidden_states
        taps = features.split(model.config.hidden_size, dim=-1)
        for z in range(NUM_LAYERS - 1):
            close(taps[z], hidden[z + 1][0])
        close(model.get_decoder().norm(taps[-1]), hidden[NUM_LAYERS][0])
    assert (taps[-1] - hidden[NUM_LAYERS][0]).abs().max() > 0.1


@pytest.mark.parametrize("tap", [-1, -2, NUM_LAYERS])
def test_taps_outside_the_model_are_refused(tap: int) -> None:
    """Fault: a negative id reads another layer by wrap-around."""
    with pytest.raises(PairError, match=f"layer {tap} of its target"):
        TorchTarget(llama(), taps=(0, tap))


def test_no_taps_no_features() -> None:
    session = TorchTarget(llama()).session()
    assert session.prefill(PROMPT).features is None
    assert session.verify(BLOCK[0], Proposal()).features is None
    session = TorchTarget(llama(), taps=(1,)).session(features=False)
    assert session.prefill(PROMPT).features is None
    assert session.verify(BLOCK[0], Proposal()).features is None


def test_hooks_act_only_in_our_forward() -> None:
    """Fault: hooks keep or alter what other users of the model compute, or stay behind."""
    model = llama()
    expected = reference(model, PROMPT)[0]

    def num_hooks() -> int:
        return sum(len(layer._forward_hooks) for layer in model.get_decoder().layers)

    others = num_hooks()  # Transformers' own, left behind by `reference`
    target = TorchTarget(model, taps=(0, 2))
    session = target.session()
    session.prefill(PROMPT)
    assert getattr(target.recorder._local, "rows", None) is None
    close(reference(model, PROMPT)[0], expected)
    assert getattr(target.recorder._local, "rows", None) is None
    assert num_hooks() == others + 2
    target.close()
    assert num_hooks() == others
    with pytest.raises(AssertionError):
        session.verify(BLOCK[0], Proposal())


def test_recorder_stops_after_an_error_and_reads_tuples() -> None:
    """Fault: a failed forward leaves the recorder on; families whose layers return tuples yield no tensor."""

    class Layer(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
            return hidden + 1, None

    layer = Layer()
    recorder = TapRecorder([layer])
    with recorder.recording() as rows:
        layer(torch.zeros(1, 2, 3))
    assert torch.equal(rows[0], torch.ones(1, 2, 3))
    with pytest.raises(KeyError), recorder.recording():
        raise KeyError
    assert recorder._local.rows is None


@pytest.mark.parametrize("exact", [False, True])
def test_sessions_are_isolated(model: PreTrainedModel, exact: bool) -> None:
    """Fault: state in the model or target leaks between requests. A alone, then A, B, A interleaved
    round by round: the same bits."""
    target = TorchTarget(model, taps=(1,), exact_width=4)
    block = Proposal(tuple(BLOCK[1:]))

    def rounds(interleave: bool) -> list[torch.Tensor]:
        session, other = target.session(exact=exact), target.session(exact=exact)
        results = [session.prefill(PROMPT).logits]
        if interleave:
            other.prefill(tokens(31, seed=8))
        for kept in (2, 5, 1):
            verdict = session.verify(BLOCK[0], block)
            results += [verdict.logits, verdict.features]
            if interleave:
                other.verify(3, Proposal((1, 2)))
                other.commit(range(1))
            session.commit(range(kept))
        return results

    for ours, expected in zip(rounds(True), rounds(False), strict=True):
        assert torch.equal(ours, expected)


def test_prefill_continues_a_session(model: PreTrainedModel) -> None:
    """Fault: the second turn of a chat restarts positions or loses the first one."""
    session = TorchTarget(model, taps=(0,), prefill_chunk=8).session()
    session.prefill(PROMPT)
    session.verify(BLOCK[0], Proposal(tuple(BLOCK[1:])))
    session.commit(range(2))
    more = tokens(9, seed=5)
    verdict = session.prefill(more)
    logits, layers = reference(model, [*PROMPT, *BLOCK[:2], *more])
    close(verdict.logits[0], logits[-1])
    close(verdict.features, layers[0][-len(more) :])


def test_prompts_are_checked() -> None:
    session = TorchTarget(llama(max_length=32)).session()
    with pytest.raises(PromptError, match="empty"):
        session.prefill([])
    with pytest.raises(PromptError, match=r"33 tokens.*holds 32"):
        session.prefill(tokens(33))


def test_the_context_can_be_filled_to_the_last_token() -> None:
    """Fault: padding rows beyond the context raise or change the last row."""
    model = llama(max_length=32)
    text = tokens(32)
    session = TorchTarget(model, exact_width=8).session()
    session.prefill(text[:31])
    close(session.verify(text[31], Proposal()).logits, reference(model, text)[0][31:])
    session.commit(range(1))
    assert session.num_tokens == session.max_length
    with pytest.raises(AssertionError):
        session.verify(1, Proposal())


def test_a_closed_session_is_empty_and_reusable() -> None:
    """Fault: freed memory is used again, or the old mask survives."""
    target = TorchTarget(llama(), exact_width=4)
    session = target.session()
    session.prefill(tokens(30, seed=9))
    session.verify(BLOCK[0], Proposal())
    session.close()
    assert (session.num_tokens, session.capacity) == (0, 0)
    fresh = target.session()
    for each in (session, fresh):
        each.prefill(PROMPT)
    block = Proposal(tuple(BLOCK[1:]))
    assert torch.equal(session.verify(BLOCK[0], block).logits, fresh.verify(BLOCK[0], block).logits)


def test_block_mask_equals_its_definition() -> None:
    """Row j sees the keys 0..start+j and nothing else, whatever the mask showed before: moves by every distance, a
    wider block, a longer storage."""
    mask = BlockMask(torch.device("cpu"), torch.float32)
    for start, num_rows, capacity in [
        (3, 4, 16),
        (3, 2, 16),
        (4, 4, 16),
        (9, 3, 16),
        (13, 3, 16),
        (14, 6, 24),
        (18, 6, 24),
    ]:
        for num_keys in (start + num_rows, capacity):
            rows = mask.rows(start, num_rows, num_keys, capacity)
            seen = torch.arange(num_keys) <= start + torch.arange(num_rows)[:, None]
            assert torch.equal(rows[0, 0] == 0, seen)
            assert bool((rows[0, 0][~seen] == torch.finfo(torch.float32).min).all())


def test_embedding_and_head(model: PreTrainedModel) -> None:
    target = TorchTarget(model)
    ids = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(target.embed_tokens(ids), target.embed_weight[ids])
    hidden = torch.randn(2, target.hidden_size)
    close(target.head(hidden), hidden @ target.head_weight.T)
    assert (target.vocab_size, target.num_layers, target.max_length) == (VOCAB_SIZE, NUM_LAYERS, MAX_LENGTH)
    assert target.embed_weight.shape == target.head_weight.shape == (VOCAB_SIZE, target.hidden_size)


def test_session_fits_the_protocol() -> None:
    session: Target = TorchTarget(llama()).session()
    assert session.max_length == MAX_LENGTH


def test_eager_attention_gives_the_same_logits() -> None:
    """Fault: the additive mask is right for one attention function only."""
    model = llama()
    model.set_attn_implementation("eager")
    session = TorchTarget(model, exact_width=4).session()
    session.prefill(PROMPT)
    ours = session.verify(BLOCK[0], Proposal(tuple(BLOCK[1:]))).logits
    assert model.config._attn_implementation == "eager"
    close(ours, reference(model, [*PROMPT, *BLOCK])[0][len(PROMPT) :])


def test_grouped_attention_leaves_other_uses_of_the_model_alone(model: PreTrainedModel) -> None:
    """Fault: training or batched use of a model that has served as a target changes: padding masks, gradients."""
    ids = torch.tensor([PROMPT, PROMPT])
    attention_mask = torch.ones_like(ids)
    attention_mask[1, :5] = 0
    before = model(input_ids=ids, attention_mask=attention_mask).logits
    TorchTarget(model)
    assert model.config._attn_implementation == compat.GROUPED_ATTENTION
    after = model(input_ids=ids, attention_mask=attention_mask).logits
    assert torch.equal(after, before)
    with torch.no_grad():
        close(model(input_ids=ids, attention_mask=attention_mask).logits[:, 5:], before[:, 5:])


def test_models_that_cannot_be_targets_are_refused() -> None:
    """Each refusal says what is missing and what to use."""
    small: dict[str, Any] = {
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    with pytest.raises(UnsupportedModel, match="no language-model head"):
        TorchTarget(LlamaModel(LlamaConfig(**small)))
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedModel, match="rotary embedding 'dynamic'"):
        TorchTarget(LlamaForCausalLM(LlamaConfig(**small, rope_parameters=dynamic)))
    flash = llama()
    flash.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UnsupportedModel, match='attn_implementation="sdpa"'):
        TorchTarget(flash)
    with pytest.raises(UnsupportedModel):
        TorchTarget(BertModel(BertConfig(**small)))


@pytest.mark.parametrize(("version", "good"), [("5.14.3", False), ("5.15.0", True), ("5.24.0", True), ("6.0.0", False)])
def test_transformers_version_is_checked(version: str, good: bool) -> None:
    if good:
        compat.check_transformers(version)
    else:
        with pytest.raises(MissingExtra, match="pip install"):
            compat.check_transformers(version)
