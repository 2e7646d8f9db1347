"""What users get wrong when they open a pair: each case ends in one error that names the cure, and nothing is guessed.

A draft that loads although it does not fit costs speed silently, so these refusals are the
only place where such faults are seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash import Engine, load
from dflash.core.draft_config import WEIGHTS_FILE
from dflash.errors import (
    CheckpointError,
    ConfigError,
    DFlashError,
    ModelError,
    PairError,
    PromptError,
)
from dflash.types import Drafting, SamplingParams
from tests.backends import tiny_pair
from tests.backends.tiny_pair import draft_config, edit_config, random_draft, save_draft, save_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return save_draft(tmp_path / "draft")


def open_pair(target: Path | str, draft: Path | str | None, **options: Any) -> object:
    return load(target, draft, **{"dtype": "float32", "device": "cpu", "num_threads": 1, "exact": False, **options})


def refuses(
    kind: type[DFlashError], message: str, target: Path | str, draft: Path | str | None, **options: Any
) -> None:
    with pytest.raises(kind, match=message) as caught:
        open_pair(target, draft, **options)
    assert "\n" not in str(caught.value), "the command line prints one line"


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


# Targets


def test_missing_target(draft: Path, tmp_path: Path) -> None:
    """A mistyped path or name never reaches the network."""
    refuses(ModelError, "does not exist", tmp_path / "nowhere", draft)
    refuses(ModelError, "smollm2-135m", "no-such-name", draft)


def test_corrupt_target_weights(tmp_path: Path) -> None:
    """An interrupted copy."""
    folder = save_target(tmp_path / "t")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refuses(CheckpointError, "damaged", folder, None)
    weights.write_bytes(b"not safetensors at all")
    refuses(CheckpointError, "damaged", folder, None)


def test_incomplete_target_weights(tmp_path: Path) -> None:
    """Transformers fills missing tensors with random numbers and goes on; a wider tensor it may skip."""
    folder = save_target(tmp_path / "t")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refuses(CheckpointError, r"lack 1 tensors.*model\.layers\.1\.mlp\.up_proj", folder, None)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refuses(CheckpointError, "do not fit", folder, None)


def test_pickled_target(tmp_path: Path) -> None:
    """Pickles can run code when opened."""
    folder = save_target(tmp_path / "t")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuses(ModelError, "convert them to safetensors", folder, None)


@pytest.mark.parametrize("how", ["list", "garbage", "type", "encoder", "tokenizer"])
def test_unreadable_target(how: str, tmp_path: Path) -> None:
    """Whatever Transformers raises for it, the user gets one sentence."""
    folder = save_target(tmp_path / "t")
    config = folder / "config.json"
    raw = json.loads(config.read_text())
    match how:
        case "list":
            config.write_text("[]")
        case "garbage":
            config.write_text("{")
        case "type":
            config.write_text(json.dumps({**raw, "model_type": "never_heard_of"}))
        case "encoder":
            config.write_text(json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}))
        case "tokenizer":
            (folder / "tokenizer.json").unlink()
    refuses(ModelError, "target", folder, None)


def test_code_in_a_target_is_not_run(tmp_path: Path) -> None:
    """Loading a malicious auto_map runs nothing unless asked to."""
    folder = save_target(tmp_path / "t")
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    config = folder / "config.json"
    raw = json.loads(config.read_text())
    raw |= {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    config.write_text(json.dumps(raw))
    refuses(ModelError, "--trust-remote-code", folder, None)
    assert not marker.exists()


def test_damaged_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that saved an error page."""
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"<html>404</html>")
    refuses(CheckpointError, "download it again", tmp_path / "m.gguf", None)


# Drafts


def test_missing_draft(target: Path, tmp_path: Path) -> None:
    """Path, name, folder without config, folder without weights."""
    refuses(ModelError, "does not exist", target, tmp_path / "nowhere")
    refuses(ModelError, "unknown", target, "no-such-name")
    refuses(ModelError, r"config\.json", target, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    refuses(ModelError, "safetensors", target, tmp_path)


def test_no_draft_for_this_target(target: Path) -> None:
    """ "auto" must not fall back to plain decoding silently."""
    refuses(ModelError, r"no draft is shipped.*dflash train", target, "auto")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 300}, "vocabulary size 300 .the target has 260"),
        ({"hidden_size": 64}, "hidden size 64 .the target has 32"),
        ({"num_target_layers": 12}, "number of target layers 12"),
        ({"num_target_layers": None, "target_layer_ids": (0, 7)}, "tap 7"),
    ],
)
def test_draft_of_another_target(change: dict[str, Any], message: str, target: Path, tmp_path: Path) -> None:
    """It uses the target's embedding and head: other widths cannot work, and the message has both numbers."""
    folder = save_draft(tmp_path / "d", random_draft(draft_config(**change)))
    refuses(PairError, message, target, folder)


@pytest.mark.parametrize(
    "key", ["target_layer_ids", "mask_token_id", "block_size", "rope_theta", "hidden_size", "vocab_size"]
)
def test_missing_keys_are_never_guessed(key: str, target: Path, draft: Path) -> None:
    """A formula for the taps even fits some real drafts with five wrong ids."""
    edit_config(draft, **{key: None})
    refuses(CheckpointError, key, target, draft)


@pytest.mark.parametrize("size", [0, 1, -3, "8"])
def test_block_size_out_of_range(size: object, target: Path, draft: Path) -> None:
    """A block needs the anchor and one draft slot."""
    edit_config(draft, block_size=size)
    refuses(CheckpointError, "block_size", target, draft)


@pytest.mark.parametrize("ids", [[0], [0, 1, 2]])
def test_fc_width_contradicts_the_taps(ids: list[int], target: Path, draft: Path) -> None:
    """fc was trained on as many taps as it is wide."""
    edit_config(draft, target_layer_ids=ids)
    refuses(CheckpointError, rf"fc reads \d+ features, but {len(ids)} taps .*target_layer_ids", target, draft)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fc.weight", "layers.1.mlp.down_proj.weight", "norm.weight"])
def test_non_finite_draft_weights(value: float, name: str, target: Path, draft: Path) -> None:
    """A diverged training run: NaN drafts never raise by themselves, they are only never accepted."""

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    edit_weights(draft, poison)
    refuses(CheckpointError, name.replace(".", r"\."), target, draft)


def test_missing_and_unexpected_draft_tensors(target: Path, draft: Path) -> None:
    """Strict both ways: 123 tensors where 91 were expected is another architecture."""
    edit_weights(draft, lambda tensors: tensors.update({"markov_head.markov_w1.weight": torch.zeros(2, 2)}))
    refuses(ModelError, "markov_head", target, draft)

    def lose_one(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["markov_head.markov_w1.weight"], tensors["hidden_norm.weight"]

    edit_weights(draft, lose_one)
    refuses(CheckpointError, "hidden_norm", target, draft)


def test_corrupt_draft_weights(target: Path, draft: Path) -> None:
    """An interrupted copy, and a file of another kind."""
    weights = draft / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-10])
    refuses(CheckpointError, "model.safetensors", target, draft)
    weights.write_bytes(b"\x80\x02pickle")
    refuses(CheckpointError, "model.safetensors", target, draft)


def test_pickled_draft(target: Path, draft: Path) -> None:
    """Drafts come as safetensors or not at all."""
    (draft / WEIGHTS_FILE).rename(draft / "pytorch_model.bin")
    refuses(ModelError, "convert them to safetensors", target, draft)


# Options and prompts


def test_unknown_options(target: Path, draft: Path) -> None:
    """Names that PyTorch would answer with a traceback, or not at all."""
    refuses(ConfigError, "float32, bfloat16", target, draft, dtype="float8")
    refuses(ConfigError, "'warp'", target, draft, device="warp")
    refuses(ConfigError, "meta", target, draft, device="meta")
    refuses(ConfigError, "threads", target, draft, num_threads=0)
    refuses(ConfigError, "at least 1", target, draft, width=0)
    refuses(ConfigError, "width 17 is more than the 16 rows", target, draft, width=17)
    fixed = Drafting(fixed=True, width=9)
    refuses(ConfigError, "width 9 is more than the 8 rows", target, draft, drafting=fixed)
    refuses(ConfigError, "no draft is loaded", target, None, width=4)
    if not torch.cuda.is_available():
        refuses(ConfigError, "cuda", target, draft, device="cuda")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target", 3),
        ("target", None),
        ("target", b"folder"),
        ("draft", 3),
        ("draft", ["a"]),
        ("dtype", torch.float32),
        ("device", 0),
        ("num_threads", "2"),
        ("num_threads", 1.0),
        ("exact", "no"),
        ("trust_remote_code", 1),
        ("width", "4"),
        ("width", 4.0),
        ("drafting", "fast"),
        ("progress", True),
    ],
    ids=str,
)
def test_arguments_of_another_type(name: str, value: Any, target: Path, draft: Path) -> None:
    """Guards against a bare TypeError, and against one that comes after minutes of loading."""
    given: dict[str, Any] = {"target": target, "draft": draft, name: value}
    refuses(ConfigError, f"^{name} must be ", **given)


@pytest.fixture(scope="module")
def engine(target: Path) -> Iterator[Engine]:
    engine = load(target, None, dtype="float32", device="cpu", num_threads=1, exact=False)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("params", {"temperature": 0.5}),
        ("params", None),
        ("drafting", "fast"),
        ("exact", 1),
        ("use_draft", None),
        ("raw", "no"),
    ],
    ids=str,
)
def test_arguments_of_a_request_of_another_type(name: str, value: Any, engine: Engine) -> None:
    """Guards against an AttributeError of the first round, and against a truth value that is only taken for one."""
    with pytest.raises(ConfigError, match=f"^{name} must be "):
        engine.stream("hi", **{name: value})


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": 5},
        {"prompt": b"hi"},
        {"prompt": {"role": "user", "content": "hi"}},
        {"prompt": ["hi"]},
        {"prompt": [["role", "user"]]},
        {"prompt": [{"role": "user", "content": 5}]},
        {"prompt": []},
        {"prompt_ids": 5},
        {"prompt_ids": "123"},
        {"prompt_ids": [1.5]},
        {"prompt_ids": [1, "2"]},
        {"prompt_ids": [1, -1]},
        {"prompt_ids": [tiny_pair.VOCAB]},
        {},
        {"prompt": "hi", "prompt_ids": [1]},
    ],
    ids=str,
)
def test_prompts_of_another_type(wrong: dict[str, Any], engine: Engine) -> None:
    """Guards against a bare TypeError or ValueError, and against 1.5 that is taken for token 1."""
    with pytest.raises(PromptError):
        engine.generate(**wrong)


def test_stop_tokens_outside_the_vocabulary(engine: Engine) -> None:
    """Guards against a stop token that can never come: the text would run to its limit without a word."""
    last = SamplingParams(max_new_tokens=1, stop_token_ids=[tiny_pair.VOCAB - 1])
    assert engine.generate(prompt_ids=torch.tensor([1, 2]), params=last).token_ids  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"stop_token_ids holds {tiny_pair.VOCAB}, .* 0 to {tiny_pair.VOCAB - 1}"):
        engine.generate("hi", SamplingParams(stop_token_ids=[tiny_pair.VOCAB]))


def test_prompt_longer_than_the_context(target: Path, draft: Path) -> None:
    """Both numbers are in the message; a prompt that leaves no room for an answer is too long, too."""
    engine = load(target, draft, dtype="float32", device="cpu", num_threads=1, exact=False)
    for length in (tiny_pair.CONTEXT, tiny_pair.CONTEXT + 1):
        with pytest.raises(PromptError, match=f"{length} tokens.*{tiny_pair.CONTEXT}"):
            engine.generate(prompt_ids=[1] * length)
    assert engine.generate(prompt_ids=[1] * (tiny_pair.CONTEXT - 1)).stats.finish_reason == "length"


def test_target_without_chat_template(tmp_path: Path) -> None:
    """Base models: the alternative is plain text."""
    engine = load(save_target(tmp_path, template=None), None, dtype="float32", num_threads=1, exact=False)
    with pytest.raises(PromptError, match="raw=True"):
        engine.generate("hi")
    assert engine.generate("hi", raw=True).token_ids


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("prompt", ["caf\udce9", "\ud800", 5])
def test_a_prompt_that_is_no_text(prompt: Any, raw: bool, target: Path) -> None:
    """Guards against a tokenizer's TypeError: bytes of another encoding on a command line become lone surrogates."""
    engine = load(str(target), None)
    engine.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(PromptError):
        engine.generate(prompt, raw=raw)
    engine.close()
