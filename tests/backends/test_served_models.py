"""Targets as people have them: in multimodal wrappers, quantised, spread by hooks; the served model is what counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import (  # type: ignore[import-untyped]
    AlignDevicesHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from transformers import AutoConfig, PreTrainedModel

from dflash.backends.torch import compat
from dflash.backends.torch.drafters.dflash import DFlashDrafter
from dflash.backends.torch.loading import SPREADS, choose_device, load_target
from dflash.backends.torch.target import TorchTarget
from dflash.errors import ConfigError
from dflash.resolve import Source
from tests.backends.architectures import ARCHITECTURES, VOCAB_SIZE, base_values
from tests.backends.matrix import (
    BLOCK,
    PROMPT,
    TOLERANCE,
    bare_layer_outputs,
    bare_logits,
    chunking_error,
    error,
    feed,
    rollback_error,
)
from tests.backends.tiny_pair import draft_config, random_draft, save_target

_VISION = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
_ONE_LAYER = {**_VISION, "num_hidden_layers": 1, "num_attention_heads": 2}
WRAPPERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3.5": (
        "Qwen3_5Config",
        "Qwen3_5ForConditionalGeneration",
        {
            "vision_config": {
                **_VISION,
                "depth": 1,
                "num_heads": 2,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
            }
        },
    ),
    "Gemma 3": (
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {"vision_config": {**_ONE_LAYER, "image_size": 16}, "mm_tokens_per_image": 4, "image_token_index": 90},
    ),
    "Gemma 4": (
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {
            "vision_config": {**_ONE_LAYER, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
            "audio_config": None,
            "image_token_id": 90,
            "boi_token_id": 91,
            "eoi_token_id": 92,
        },
    ),
    "DeepSeek-V3, Kimi-K2": (
        "Kimi_K25Config",
        "Kimi_K25ForConditionalGeneration",
        {
            "vision_config": {**_ONE_LAYER, "pos_emb_height": 4, "pos_emb_width": 4},
            "image_token_id": 90,
        },
    ),
}


def wrapped(family: str) -> PreTrainedModel:
    """A multimodal model around the family's language model."""
    config_name, model_name, values = WRAPPERS[family]
    text = base_values(family)
    if config_name == "Kimi_K25Config":
        text["model_type"] = "deepseek_v3"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, config_name)(text_config=text, **values)
        model: PreTrainedModel = getattr(transformers, model_name)(config)
    model.eval()
    return model


@pytest.mark.parametrize("family", WRAPPERS)
def test_wrappers_resolve_to_their_language_model(family: str, tmp_path: Path) -> None:
    """Fault: sizes, taps or states are read from the wrapper, or the wrapper is not loaded at all (Kimi-K2.5)."""
    model = wrapped(family)
    target = TorchTarget(model, taps=(0,), exact_width=4)
    assert target.hidden_size == 32
    for kept in (0, 2, len(BLOCK)):
        assert rollback_error(target, kept, exact=kept == 2) < TOLERANCE
    target.close()
    assert chunking_error(model, (0,), 6) < TOLERANCE
    model.save_pretrained(tmp_path)
    loaded = compat.auto_class(AutoConfig.from_pretrained(tmp_path)).from_pretrained(tmp_path)
    assert error(bare_logits(loaded.eval(), PROMPT), bare_logits(model, PROMPT)) < TOLERANCE
    again = TorchTarget(loaded)
    assert rollback_error(again, 2, exact=False) < TOLERANCE
    again.close()


class Rounded(torch.nn.Linear):
    """A linear layer that computes with its weight rounded to eighths, as quantised layers do."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(inputs, (self.weight * 8).round() / 8, self.bias)


def test_features_come_from_the_quantised_model() -> None:
    """Fault: logits or features of other weights than those that are served."""
    model = ARCHITECTURES["Qwen3"].build()
    exact_features = bare_layer_outputs(model, (0,))
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = Rounded
    target = TorchTarget(model, taps=(0,))
    features = target.session().prefill(PROMPT).features
    assert error(features, bare_layer_outputs(model, (0,))) < TOLERANCE
    assert error(features, exact_features) > 10 * TOLERANCE
    assert rollback_error(target, 2, exact=False) < TOLERANCE
    target.close()


def test_quantised_checkpoints_are_put_on_their_device_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: quantised weights are moved after loading, which their libraries refuse."""
    save_target(tmp_path)
    asked: list[Any] = []
    original: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained

    def spy(folder: Path, **options: Any) -> Any:
        asked.append(options.pop("device_map"))
        if options["config"].__dict__.pop("quantization_config", None) is not None:
            model, info = original(folder, **options)
            monkeypatch.setattr(type(model), "to", None)  # moving it would raise
            return model, info
        return original(folder, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", spy)
    place = torch.device("cpu")
    load_target(Source(name="plain", path=tmp_path), dtype=torch.float32, device=place)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("{", '{"quantization_config": {"quant_method": "toy"},', 1))
    load_target(Source(name="quantised", path=tmp_path), dtype=torch.float32, device=place)
    assert asked == [None, {"": place}]


@pytest.mark.parametrize("family", ["Gemma 3", "Qwen3.5"])
def test_layers_behind_hooks_that_move_tensors(family: str) -> None:
    """Fault: masks per kind of layer, our cache, or the recorded projections do not survive accelerate's hooks, which
    `device_map` puts around every layer. With a GPU every other layer really lies on it."""
    model = ARCHITECTURES[family].build()
    expected = bare_logits(model, [*PROMPT, *BLOCK])[len(PROMPT) :]
    features = bare_layer_outputs(model, (0, 1))
    layers = model.get_decoder().layers
    for index, layer in enumerate(layers):
        place = "cuda" if torch.cuda.is_available() and index % 2 else "cpu"
        add_hook_to_module(layer, AlignDevicesHook(place, io_same_device=True, place_submodules=True))
    target = TorchTarget(model, taps=(0, 1), exact_width=4)
    session = target.session()
    found = session.prefill(PROMPT).features
    assert found.device == target.device
    assert error(found, features) < TOLERANCE
    for kept in (2, len(BLOCK)):
        again = target.session()
        again.prefill(PROMPT)
        assert error(feed(again, BLOCK), expected) < TOLERANCE
        again.commit(range(kept))
        assert again.num_tokens == len(PROMPT) + kept
    assert rollback_error(target, 2, exact=False) < TOLERANCE
    target.close()
    remove_hook_from_module(model, recurse=True)


@pytest.mark.parametrize("spread", SPREADS)
def test_a_target_is_spread_over_the_gpus(spread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the choice does not reach Transformers, the spread model is moved to one device afterwards, or a part that
    is left on the CPU is found out in the middle of a forward."""
    save_target(tmp_path)
    asked: list[Any] = []
    places: dict[str, Any] = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "lm_head": 1}
    original: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained

    def spy(folder: Path, **options: Any) -> Any:
        asked.append(options.pop("device_map"))
        model, info = original(folder, **options)
        monkeypatch.setattr(type(model), "to", None)  # moving it would raise
        model.hf_device_map = places
        return model, info

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", spy)
    source, place = Source(name="spread", path=tmp_path), torch.device("cpu")
    load_target(source, dtype=torch.float32, device=place, spread=spread)
    assert asked == [spread]
    places["lm_head"] = "cpu"
    with pytest.raises(ConfigError, match=r"1 of its 4 parts are left over, first lm_head"):
        load_target(source, dtype=torch.float32, device=place, spread=spread)


@pytest.mark.parametrize("available", [True, False])
def test_what_spreads_needs_gpus(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an option without effect, or a device of that name looked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    if available:
        assert choose_device("balanced") == torch.device("cuda", 0)
    else:
        with pytest.raises(ConfigError, match=r"'balanced' spreads the target .* there is none"):
            choose_device("balanced")


def test_a_draft_reads_a_head_on_another_device() -> None:
    """Fault: block states on the embedding's device meet a head on the last layer's. Without a GPU both are the CPU,
    and only that nothing changes is seen."""
    place = "cuda" if torch.cuda.is_available() else "cpu"
    model = ARCHITECTURES["Llama"].build()
    draft = random_draft(
        draft_config(
            vocab_size=VOCAB_SIZE,
            hidden_size=model.config.hidden_size,
            mask_token_id=3,
            target_layer_ids=(0,),
            num_target_layers=None,
        )
    ).eval()
    proposals = []
    for spread in (False, True):
        if spread:
            hook = AlignDevicesHook(place, io_same_device=True, place_submodules=True)
            add_hook_to_module(model.get_output_embeddings(), hook)
        target = TorchTarget(model, taps=(0,))
        drafter = DFlashDrafter(draft, target)
        session = drafter.session()
        session.observe(PROMPT, target.session().prefill(PROMPT).features)
        proposals.append(tuple(session.propose(5, 4).tokens))
        assert drafter.head_KH.device == target.device
        target.close()
    assert proposals[0] == proposals[1]
    remove_hook_from_module(model, recurse=True)
