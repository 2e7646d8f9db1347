"""Plain and speculative decoding against mlx-lm's own greedy generation: the same weights, none of our forwards.

Targets as they are stored and quantised by mlx-lm (weights, keys and values): the reference quantises the same way, so
equal ids mean that nothing is read, rounded or kept otherwise here.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")

import mlx.nn as nn  # noqa: E402
import mlx_lm  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models.cache import QuantizedKVCache  # noqa: E402
from mlx_lm.tokenizer_utils import TokenizerWrapper  # noqa: E402
from mlx_lm.utils import load_model, quantize_model, save_config, save_model  # noqa: E402

from dflash.backends.mlx.compat import embedding_and_head  # noqa: E402
from dflash.core.engine import Engine  # noqa: E402
from dflash.errors import ConfigError  # noqa: E402
from dflash.types import Drafting, SamplingParams  # noqa: E402
from scripts.compare_mlx import compare  # noqa: E402
from tests.backends.pairs import GREEDY, PROMPTS, SAMPLED, open_mlx_engine  # noqa: E402
from tests.backends.test_conformance import ScriptedDrafter  # noqa: E402
from tests.backends.tiny_pair import HIDDEN, save_target  # noqa: E402

FIXED = Drafting(fixed=True)
LONG = dataclasses.replace(GREEDY, max_new_tokens=40)
"""Long enough for rounds of most lengths."""


def mlx_lm_greedy(model: Any, prompt_ids: Sequence[int], num_tokens: int, **options: Any) -> list[int]:
    """What mlx-lm generates; its default sampler takes the likeliest token."""
    steps = generate_step(mx.array(list(prompt_ids)), model, max_tokens=num_tokens, **options)
    return [int(token) for token, _ in steps]


def weights_of(folder: Path) -> Any:
    """The target as mlx-lm loads it, apart from any engine."""
    model, _ = load_model(folder)
    return model


def with_script(engine: Engine, truth: Sequence[int]) -> Engine:
    """The same target with a draft that is right for a while and then wrong, in every round."""
    return type(engine)(
        target=engine.target,
        drafter=ScriptedDrafter(truth, seed=0),
        tokenizer=engine.tokenizer,
        eos_ids=engine.eos_ids,
        info=engine.info,
    )


def same_as_mlx_lm(
    engine: Engine, folder: Path, prompts: Sequence[str] = PROMPTS, kv_bits: int | None = None
) -> Counter[int]:
    """Compare both ways of decoding with mlx-lm; returns the rounds by acceptance length."""
    lengths: Counter[int] = Counter()
    model = weights_of(folder)
    for prompt in prompts:
        # Left to its own option, mlx-lm would quantise only behind the prompt.
        caches = kv_bits and [QuantizedKVCache(group_size=64, bits=kv_bits) for _ in model.layers]
        expected = mlx_lm_greedy(model, engine.tokenize(prompt), LONG.max_new_tokens, prompt_cache=caches)
        assert len(set(expected)) > 3, "one token over and over would prove little"
        assert list(engine.generate(prompt, LONG, use_draft=False).token_ids) == expected
        drafted = engine.generate(prompt, LONG, drafting=FIXED)
        assert list(drafted.token_ids) == expected
        lengths.update(drafted.stats.acceptance_lengths)
        scripted = with_script(engine, [*engine.tokenize(prompt), *expected]).generate(prompt, LONG, drafting=FIXED)
        assert list(scripted.token_ids) == expected
        assert len(set(scripted.stats.acceptance_lengths)) > 4  # rolled back to many different rows
    return lengths


def test_greedy_text_is_mlx_lms(target_folder: Path, draft_folder: Path, trained_folder: Path) -> None:
    """Fault: a wrong mask, position or weight that plain and speculative decoding share, so that comparing them with
    each other shows nothing."""
    for folder, is_good in ((trained_folder, True), (draft_folder, False)):
        engine = open_mlx_engine(target_folder, folder)
        lengths = same_as_mlx_lm(engine, target_folder)
        assert (lengths[8] > 7) == is_good
        assert (lengths[1] > 70) != is_good
        engine.close()


def test_the_text_is_that_of_mlx_lms_generate(target_folder: Path, trained_folder: Path) -> None:
    """Fault: the tokens are right one by one and the whole is not: where it ends, what its text is. Also that
    scripts/compare_mlx.py, which asks this of real pairs, compares what it says."""
    engine = open_mlx_engine(target_folder, trained_folder)
    tokenizer = TokenizerWrapper(engine.tokenizer, eos_token_ids=sorted(engine.eos_ids))
    model = weights_of(target_folder)
    for prompt in PROMPTS[:2]:
        text = mlx_lm.generate(model, tokenizer, prompt=engine.tokenize(prompt), max_tokens=40)
        for use_draft in (False, True):
            result = engine.generate(prompt, SamplingParams(max_new_tokens=40), use_draft=use_draft)
            assert result.text.strip("\ufffd") == text.strip("\ufffd")  # a character that is cut in the middle
    engine.close()
    found = compare(str(target_folder), str(trained_folder), PROMPTS[:1], max_new_tokens=24)
    (row,) = found["prompts"]
    assert row["same_as_mlx_lm"] and row["same_as_torch"]
    assert len(row["token_ids"]) == 24
    assert row["acceptance_length"] == row["torch_acceptance_length"] > 3
    assert 0 < row["overhead_share"] < 1
    assert set(row["tokens_per_second"]) == {"plain", "plain_exact", "fixed", "default"}
    assert found["mlx"]["same_as_mlx_lm"]


def quantised(source: Path, folder: Path, bits: int) -> Path:
    """The target as `mlx_lm.convert --quantize` would store it."""
    shutil.copytree(source, folder)
    model, config = load_model(source)
    model, config = quantize_model(model, config, group_size=HIDDEN, bits=bits)
    (folder / "model.safetensors").unlink()
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return folder


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_targets(bits: int, target_folder: Path, trained_folder: Path, tmp_path: Path) -> None:
    """Fault: quantised weights are widened, rounded to another type or read past (embedding, head) where the draft uses
    them; blocks run on other kernels than single rows."""
    folder = quantised(target_folder, tmp_path / "target", bits)
    engine = open_mlx_engine(folder, trained_folder)
    assert isinstance(embedding_and_head(weights_of(folder))[0], nn.QuantizedEmbedding)
    same_as_mlx_lm(engine, folder, PROMPTS[:1])
    plain = engine.generate(PROMPTS[0], SAMPLED, use_draft=False)
    assert engine.generate(PROMPTS[0], SAMPLED).token_ids == plain.token_ids
    engine.close()


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_keys_and_values(bits: int, draft_folder: Path, tmp_path: Path) -> None:
    """Fault: a row is quantised together with others or twice, the option reaches one way of decoding only, or none."""
    folder = save_target(tmp_path, head_dim=64)
    engine = open_mlx_engine(folder, draft_folder, kv_bits=bits)
    same_as_mlx_lm(engine, folder, PROMPTS[:1], kv_bits=bits)
    plain = engine.generate(PROMPTS[0], SAMPLED, use_draft=False)
    assert engine.generate(PROMPTS[0], SAMPLED).token_ids == plain.token_ids
    unquantised = open_mlx_engine(folder, None)
    assert unquantised.generate(PROMPTS[0], GREEDY).token_ids != engine.generate(PROMPTS[0], GREEDY).token_ids
    engine.close()
    unquantised.close()


def test_heads_that_cannot_be_quantised_are_refused(target_folder: Path) -> None:
    """Fault: a traceback from inside MLX where a head's size is no multiple of the group that shares a scale."""
    with pytest.raises(ConfigError, match=r"kv_bits .* 64, and not 8: leave it out"):
        open_mlx_engine(target_folder, None, kv_bits=8)
