"""A language model as the drafter: plain decoding's text, a state that equals the committed text, misfits refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from dflash import Drafting
from dflash.backends.torch.drafters.autoregressive import AutoregressiveDrafter, AutoregressiveSession
from dflash.backends.torch.engine import TorchEngine as Engine
from dflash.backends.torch.sampling import TorchAcceptor
from dflash.backends.torch.target import TorchTarget
from dflash.core.autoregressive import CHAIN
from dflash.core.cost import CostCurve, CostTracker
from dflash.core.drafting import make_session
from dflash.core.engine import Engine as AnyEngine
from dflash.core.language_model import is_language_model
from dflash.core.loop import speculative_rounds
from dflash.core.memory import Memory
from dflash.core.stopping import StopRule
from dflash.errors import PairError, UnsupportedModel
from dflash.types import Proposal, SamplingParams
from tests.backends.architectures import ARCHITECTURES, VOCAB_SIZE
from tests.backends.committed_text import check_table, follow
from tests.backends.pairs import GREEDY, PROMPTS, SAMPLED, OpenEngine, PlainTexts
from tests.backends.pairs import open_engine as open_torch_engine
from tests.backends.tiny_pair import CONTEXT, save_target

FREE_ROWS = CostCurve((1, 64), (0,), ((1.0, 1.0),))
FAMILIES = ("Llama", "Mistral", "Qwen3.5")
"""Full, windowed and recurrent state."""


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model of another shape, whose embedding is padded and whose context is shorter."""
    folder = tmp_path_factory.mktemp("other")
    return save_target(
        folder, seed=3, hidden_size=16, num_hidden_layers=1, vocab_size=264, max_position_embeddings=CONTEXT // 8
    )


@pytest.fixture(scope="module")
def engine_of_two(target_folder: Path, other_folder: Path) -> Engine:
    return open_torch_engine(target_folder, other_folder)


@pytest.fixture(scope="module")
def any_engine_of_two(open_engine: OpenEngine, target_folder: Path, other_folder: Path) -> AnyEngine:
    return open_engine(target_folder, other_folder)


@pytest.fixture(scope="module")
def plain_texts(any_engine_of_two: AnyEngine) -> PlainTexts:
    return PlainTexts(any_engine_of_two)


def test_a_model_drafts_for_itself_and_everything_is_accepted(open_engine: OpenEngine, target_folder: Path) -> None:
    """Fault: the draft model's positions or context are off by one, or rejected rows stay in its state."""
    engine = open_engine(target_folder, target_folder)
    assert type(engine.drafter).__name__ == "AutoregressiveDrafter"
    assert engine.info.block_size == CHAIN + 1
    assert engine.info.draft_sha256 is not None
    for prompt in PROMPTS[:2]:
        plain = engine.generate(prompt, GREEDY, use_draft=False)
        drafted = engine.generate(prompt, GREEDY, drafting=Drafting(fixed=True))
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.num_accepted == drafted.stats.num_proposed > 0
    engine.close()


@pytest.mark.parametrize("drafting", [Drafting(), Drafting(mode="fast", draws=False), Drafting(fixed=True)], ids=str)
def test_any_model_drafts_losslessly(any_engine_of_two: AnyEngine, plain_texts: PlainTexts, drafting: Drafting) -> None:
    """Fault: guesses that change the text, padding ids that crash, or a failure at the end of the draft's context."""
    engine = any_engine_of_two
    if drafting.mode == "fast" and not engine.target.session().supports_trees:
        pytest.skip("without trees this is mode exact")
    engine.memory = Memory(CostTracker(FREE_ROWS))
    for prompt in PROMPTS[1:]:  # the last one and its answer leave the draft's context
        for params in (GREEDY, SAMPLED):
            params = dataclasses.replace(params, max_new_tokens=24)
            drafted = engine.generate(prompt, params, drafting=drafting)
            assert drafted.token_ids == plain_texts(prompt, params).token_ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_kind_of_state_drafts(family: str, temperature: float) -> None:
    """Fault: a window or a recurrent state that is not where the committed text left it."""
    model = ARCHITECTURES[family].build()
    target = TorchTarget(model)
    drafter = AutoregressiveDrafter(TorchTarget(ARCHITECTURES[family].build()), target)
    assert drafter.session()._rewinds == (family == "Llama")
    prompt = [number * 7 % VOCAB_SIZE for number in range(20)]
    plain, _ = text_of(target, None, prompt, temperature)
    drafted, lengths = text_of(target, drafter, prompt, temperature)
    assert drafted == plain
    if not temperature:
        assert max(lengths) == CHAIN + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_equals_that_of_the_committed_text(family: str) -> None:
    """Fault: what was rejected, or asked and never fed, leaves a trace. The slow reference is a fresh session that is
    given the whole text, and where layers can go back also the drafter that never lets them."""
    model = TorchTarget(ARCHITECTURES[family].build())
    generator = torch.Generator().manual_seed(5)
    draw = torch.randint(VOCAB_SIZE, (300,), generator=generator).tolist()
    session = AutoregressiveDrafter(model, model).session()
    slow = AutoregressiveDrafter(model, model, rewinds=False).session()

    def same(one: Proposal, other: Proposal) -> None:
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)

    *text, anchor = follow((session, slow), draw, same)
    assert list(session.propose(anchor, CHAIN).tokens) == greedy(model, [*text, anchor], CHAIN)


def test_candidates_are_the_best_of_each_slot(engine_of_two: Engine) -> None:
    """Fault: the table's first column is not the chain, or log-probabilities are logits."""
    engine = engine_of_two
    assert isinstance(engine.drafter, AutoregressiveDrafter)
    session: AutoregressiveSession = engine.drafter.session()
    session.observe([1, 2, 3], None)
    proposal = session.propose(4, 5)
    table = session.candidates(4, 5, 3)
    check_table(table, proposal.tokens, 3)
    assert [row[0] for row in table.log_probs] == pytest.approx(proposal.log_probs, abs=1e-5)
    session.observe([5] * (CONTEXT // 8), None)
    assert session.propose(4, 5).tokens == ()
    assert session.candidates(4, 5, 3).ids == ()


def test_another_tokenizer_is_refused(open_engine: OpenEngine, target_folder: Path, tmp_path: Path) -> None:
    """Fault: ids that stand for other texts are proposed, and only the speed tells."""
    folder = save_target(tmp_path / "swapped")
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    vocabulary = raw["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(raw))
    with pytest.raises(PairError, match=r"tokenizer is another one \(token '[ab]'.*smaller model of the target's own"):
        open_engine(target_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    tokenizer.add_tokens(["more"])
    longer = save_target(tmp_path / "longer")
    tokenizer.save_pretrained(longer)
    with pytest.raises(PairError, match="it has 261 tokens, the target 260"):
        open_engine(target_folder, longer)


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, True),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, True),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, False),
        ({"architectures": ["LlamaForCausalLM"], "dspark_block_size": 7}, False),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, False),
        ({"architectures": ["DFlashDraftModel"]}, False),
        ({"architectures": "LlamaForCausalLM"}, False),
        ({}, False),
    ],
)
def test_language_models_are_told_from_drafts(raw: dict[str, Any], answer: bool) -> None:
    assert is_language_model(raw) is answer


def test_what_reads_drafts_says_why_not(target_folder: Path) -> None:
    """Fault: checking or converting a language model complains of keys that it cannot have."""
    from dflash.core.draft_reader import read_draft

    with pytest.raises(UnsupportedModel, match="a language model of its own"):
        read_draft(target_folder)


def greedy(model: TorchTarget, text: list[int], count: int) -> list[int]:
    """By fresh forwards over the whole text."""
    tokens = list(text)
    for _ in range(count):
        with torch.no_grad():
            own: PreTrainedModel = model.model
            tokens.append(int(own(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(text) :]


def text_of(
    target: TorchTarget, drafter: AutoregressiveDrafter | None, prompt: list[int], temperature: float
) -> tuple[list[int], list[int]]:
    """Twenty-four tokens, and the lengths of the rounds."""
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
    session = target.session(exact=False)
    drafting = None
    if drafter is not None:
        drafting = make_session(drafter, Drafting(fixed=True), Memory(), max_rows=16, supports_trees=False)
    rounds = speculative_rounds(
        session,
        drafting,
        TorchAcceptor(params, prompt, target.vocab_size, target.device),
        StopRule(),
        prompt,
        max_new_tokens=24,
    )
    steps = [step.tokens for step in rounds]
    session.close()
    return [token for tokens in steps for token in tokens], [len(tokens) for tokens in steps]
