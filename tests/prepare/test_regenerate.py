"""The target's own answers: equal to plain decoding whatever the batch, and templates that cannot work."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaForCausalLM

from dflash.errors import ConfigError, DataError, ModelError
from dflash.prepare.regenerate import Answerer, check_template, cut_at_stop, weights_fingerprint
from tests.prepare.tiny_target import END_ID, SPECIAL, TEMPLATE, tiny_model, tiny_target, tiny_tokenizer

PROMPTS = ["a", "what is this?", "name three things", "b c", "why " * 9]


def _answerer(model: LlamaForCausalLM | None = None, **options: Any) -> Answerer:
    options = {"max_new_tokens": 24, "temperature": 0.0} | options
    return Answerer(tiny_target(model), **options)


def _prompts(answerer: Answerer) -> list[list[int]]:
    return [answerer.prompt_ids([{"role": "user", "content": text}]) for text in PROMPTS]


def _plain_greedy(model: LlamaForCausalLM, prompt: list[int], limit: int) -> list[int]:
    """The slow reference: whole sequence each time, no cache, no padding, no generate."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == END_ID:
            break
    return ids[len(prompt) :]


def test_batched_answers_equal_plain_decoding() -> None:
    """Guards against padding that leaks (mask, positions), a lost first or end token, and padding kept as answer:
    five prompts of different length in one batch, answers of different length, against a loop without a cache."""
    model = tiny_model()
    answerer = _answerer(model)
    prompts = _prompts(answerer)
    expected = [_plain_greedy(model, prompt, 24) for prompt in prompts]
    assert len({len(answer) for answer in expected}) > 1, "the case must contain answers that end early"
    assert answerer.answer(prompts) == expected
    assert [answerer.answer([prompt])[0] for prompt in prompts] == expected


def test_generation_defaults_of_the_model_are_set_aside() -> None:
    """Guards against answers that plain decoding would never give: `generate` merges every default of the model's
    generation_config.json (repetition penalty, suppressed tokens, ...) into what the caller leaves unset."""
    model = tiny_model()
    prompts = _prompts(_answerer(model))
    expected = _answerer(model).answer(prompts)
    own = model.generation_config
    own.repetition_penalty, own.suppress_tokens, own.min_new_tokens = 9.0, [expected[0][0]], 20
    assert _answerer(model).answer(prompts) == expected
    assert model.generation_config is own


def test_sampled_tokens_follow_the_whole_distribution() -> None:
    """Guards against the top-k 50 that `generate` applies by default. 6000 draws of one token from a flat
    distribution over 260 ids; chi-square at p = 1e-4 with a fixed seed. With top-k 50 most bins would be empty."""
    model = tiny_model()
    answerer = _answerer(model, max_new_tokens=1, temperature=2.0)
    prompt = answerer.prompt_ids([{"role": "user", "content": "draw"}])
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1].double()
    p = torch.softmax(logits / 2.0, -1).numpy()
    with answerer.seeded(seed=3, shard=0):
        drawn = Counter(ids[0] for _ in range(6) for ids in answerer.answer([prompt] * 1000))
    seen = np.array([drawn[token] for token in range(len(p))], dtype=np.float64)
    often = p * seen.sum() >= 5
    assert often.sum() > 100
    observed = np.append(seen[often], seen[~often].sum())
    expected = np.append(p[often], p[~often].sum()) * seen.sum()
    assert chisquare(observed, expected).pvalue > 1e-4


def test_random_stream_belongs_to_seed_and_shard() -> None:
    """Guards against answers that depend on what ran before, and against disturbing the caller's own draws."""
    answerer = _answerer(temperature=1.0)
    prompts = _prompts(answerer)

    def draw(seed: int, shard: int) -> list[list[int]]:
        with answerer.seeded(seed, shard):
            return answerer.answer(prompts)

    torch.manual_seed(5)
    first = draw(1, 0)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))
    assert draw(1, 0) == first
    assert draw(1, 1) != first
    assert draw(2, 0) != first


def test_answers_end_at_any_stop_id() -> None:
    """Guards against the one-EOS assumption: with a second end token the answers end there, earlier than before."""
    model = tiny_model()
    prompts = _prompts(_answerer(model))
    before = _answerer(model).answer(prompts)
    second = before[0][3]
    model.generation_config.eos_token_id = [END_ID, second]
    after = _answerer(model).answer(prompts)
    assert after == [cut_at_stop(answer, frozenset({END_ID, second})) for answer in before]
    assert after[0][-1] == second
    assert len(after[0]) <= 4 < len(before[0])
    assert cut_at_stop([1, 2, 7, 7, 2], frozenset({7})) == [1, 2, 7]
    assert cut_at_stop([1, 2], frozenset({7})) == [1, 2]


def test_prompt_ids_use_template_or_plain_text() -> None:
    """Guards against special tokens doubled by the tokenizer, and a system message that is lost."""
    tokenizer = tiny_tokenizer()
    user, assistant, system = (tokenizer.convert_tokens_to_ids(name) for name in (SPECIAL[2], SPECIAL[3], SPECIAL[1]))
    letter = tokenizer("x")["input_ids"]
    messages = [{"role": "user", "content": "x"}]
    assert _answerer().prompt_ids(messages) == [user, *letter, END_ID, assistant]
    assert _answerer(raw=True).prompt_ids(messages) == letter
    assert _answerer(system="x").prompt_ids([{"role": "system", "content": "x"}, *messages])[0] == system
    assert _answerer().text([*letter, END_ID]) == "x"
    with pytest.raises(DataError, match="raw mode takes one plain text per row"):
        _answerer(raw=True).prompt_ids([*messages, *messages])
    with pytest.raises(ConfigError, match="leave out either raw or system"):
        _answerer(raw=True, system="x")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "no chat template.*--raw"),
        ("{% if add_generation_prompt %}<|assistant|>{% endif %}", "drops the user's message"),
        (
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}",
            "yields no answer tokens.*answer mask would be empty",
        ),
    ],
)
def test_useless_template_is_refused(template: str | None, says: str) -> None:
    """Guards against hours of answers from which nothing can be learned."""
    with pytest.raises(ModelError, match=says):
        check_template(tiny_tokenizer(template))


def test_system_message_must_have_an_effect() -> None:
    """Guards against an option that is accepted and ignored, and a template's own exception as a traceback."""
    check_template(tiny_tokenizer(), system="be brief")
    deaf = TEMPLATE.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'system' %}"
    )
    with pytest.raises(ConfigError, match="ignores system messages"):
        check_template(tiny_tokenizer(deaf), system="be brief")
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    check_template(tiny_tokenizer(refusing))
    with pytest.raises(ConfigError, match=r"no system message can be used.*no system role"):
        check_template(tiny_tokenizer(refusing), system="be brief")


def test_fingerprint_sees_a_training_step() -> None:
    """Guards against going on with other weights under the same path: one changed parameter must show."""
    model = tiny_model()
    before = weights_fingerprint(model)
    assert weights_fingerprint(tiny_model()) == before
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight += 1e-3
    assert weights_fingerprint(model) != before


def test_full_gpu_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a CUDA traceback where a smaller batch is the answer."""
    model = tiny_model()

    def no_room(**_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "generate", no_room)
    with pytest.raises(ConfigError, match=r"batch of 1 prompts.*smaller batch_size"):
        _answerer(model).answer([[1, 2]])
