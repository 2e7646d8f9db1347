"""A GGUF draft is the draft that it was made from: the same description, weights and proposals; others are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file

from dflash import load
from dflash.backends.torch.draft_loading import load_draft
from dflash.backends.torch.draft_model import DraftModel
from dflash.core.draft_config import CONFIG_FILE, WEIGHTS_FILE
from dflash.core.draft_reader import read_draft_config
from dflash.errors import CheckpointError, DFlashError, UnsupportedModel
from dflash.gguf_draft import translate, translated_folder
from dflash.resolve import resolve_draft, resolve_target
from dflash.types import Drafting, SamplingParams
from tests.backends.tiny_pair import MASK, VOCAB, draft_config, random_draft, save_draft, save_target

NAMES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Original name -> llama.cpp's, after its converter and `src/models/dflash.cpp`."""
Fields = dict[str, Any]
Tensors = dict[str, np.ndarray]


def stated(network: DraftModel) -> Fields:
    """What llama.cpp's converter writes for a draft, taps counted from the input of a layer."""
    config = network.config
    return {
        "dflash.block_count": config.num_hidden_layers,
        "dflash.embedding_length": config.hidden_size,
        "dflash.feed_forward_length": config.intermediate_size,
        "dflash.attention.head_count": config.num_attention_heads,
        "dflash.attention.head_count_kv": config.num_key_value_heads,
        "dflash.attention.key_length": config.head_dim,
        "dflash.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "dflash.attention.causal": False,
        "dflash.rope.freq_base": config.rope_theta,
        "dflash.block_size": config.block_size,
        "dflash.target_layers": [tap + 1 for tap in config.target_layer_ids],
        "tokenizer.ggml.mask_token_id": config.mask_token_id,
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(config.vocab_size)],
    }


def weights(network: DraftModel) -> Tensors:
    """The network's tensors by their GGUF names."""
    found = {}
    for name, value in network.state_dict().items():
        layer, theirs = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", name).groups()  # type: ignore[union-attr]
        found[f"{(layer or '').replace('layers', 'blk')}{NAMES[theirs]}.weight"] = value.float().numpy()
    return found


def write(
    path: Path, fields: Mapping[str, Any], tensors: Tensors, *, architecture: str = "dflash", packed: bool = False
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in fields.items():
        adders[type(value)](key, value)
    for name, value in tensors.items():
        if packed and value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def network() -> DraftModel:
    """Widths that are whole blocks of Q8_0."""
    return random_draft(draft_config(intermediate_size=64))


def test_same_description_and_weights(network: DraftModel, tmp_path: Path) -> None:
    """Guards against a tensor under a wrong name, a transposed one, an epsilon of 9.99e-07 and taps one layer late."""
    folder = translated_folder(write(tmp_path / "d.gguf", stated(network), weights(network)), cache=tmp_path)
    assert read_draft_config(folder) == replace(network.config, num_target_layers=None)
    loaded = load_draft(folder, torch.device("cpu"), torch.float32).state_dict()
    assert loaded.keys() == network.state_dict().keys()
    for name, value in network.state_dict().items():
        assert torch.equal(loaded[name], value), name


def test_packed_weights_are_unpacked_exactly(network: DraftModel, tmp_path: Path) -> None:
    """Guards against values that are rounded a second time on their way."""
    folder = translated_folder(
        write(tmp_path / "d.gguf", stated(network), weights(network), packed=True), cache=tmp_path
    )
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = 0
    for name, value in load_file(folder / WEIGHTS_FILE).items():
        original = network.state_dict()[name].numpy()
        expected = dequantize(quantize(original, kind), kind) if original.ndim == 2 else original
        assert np.array_equal(value, expected), name
        packed += not np.array_equal(value, original)
    assert packed > 10


def test_decodes_as_the_draft_it_was_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, `dflash.load` with a file: the same proposals round by round, the same text; translated once."""
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    target, network = save_target(tmp_path / "target"), random_draft(draft_config())
    file = write(tmp_path / "d.gguf", stated(network), weights(network))
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    results = []
    for draft in (save_draft(tmp_path / "draft", network), file, file):
        engine = load(target, draft, dtype="float32", device="cpu", num_threads=1)
        results.append(engine.generate("abc", params, drafting=Drafting(fixed=True)))  # whatever rounds cost
        assert engine.info.draft == str(draft)
        engine.close()
    assert results[0].token_ids == results[1].token_ids == results[2].token_ids
    assert results[0].stats.accepted_per_slot == results[1].stats.accepted_per_slot
    assert [path.parent.name for path in (tmp_path / "cache" / "drafts").rglob(CONFIG_FILE)] == [
        resolve_draft(str(file), resolve_target(str(target))).path.name
    ]


def test_second_generation(network: DraftModel, tmp_path: Path) -> None:
    """DFlash 2 in the names and keys of its own checkpoints, as the reader of those takes them."""
    rng = np.random.default_rng(0)
    more: dict[str, tuple[int, ...]] = {
        "selector_hidden.weight": (4, 32),
        "selector_predecessor.weight": (VOCAB, 4),
        "selector_successor.weight": (VOCAB, 4),
    }
    for layer in range(2):
        for part in ("attn", "ffn"):
            more[f"blk.{layer}.{part}_conv_base"] = (2, 2, 32)
            more[f"blk.{layer}.{part}_conv_proj.weight"] = (8, 32)
    extra = {name: rng.normal(size=shape).astype(np.float32) for name, shape in more.items()}
    keys = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 4, "selector_top_k": 4}
    fields = stated(network) | {f"dflash.{key}": value for key, value in keys.items()}
    fields |= {"dflash.attention.sliding_window": 64, "dflash.attention.sliding_window_pattern": [True, False]}
    fields |= {"dflash.rope.scaling.type": "yarn", "dflash.rope.scaling.factor": 32.0}
    fields |= {"dflash.rope.scaling.original_context_length": 4096}
    translate(write(tmp_path / "d.gguf", fields, weights(network) | extra), tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert {key: config[key] for key in keys} == keys
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert (config["sliding_window"], config["is_causal"]) == (64, False)
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
    }
    assert read_draft_config(tmp_path).target_layer_ids == network.config.target_layer_ids
    load_draft(tmp_path, torch.device("cpu"), torch.float32)
    found = load_file(tmp_path / WEIGHTS_FILE)
    assert np.array_equal(found["candidate_selector.successor_codebook"], extra["selector_successor.weight"])
    assert np.array_equal(found["layers.1.mlp_conv.base_kernel"], extra["blk.1.ffn_conv_base"])
    assert np.array_equal(
        found["layers.0.attention_conv.kernel_projection.weight"], extra["blk.0.attn_conv_proj.weight"]
    )


def without(*keys: str) -> Callable[[Fields, Tensors], None]:
    def change(fields: Fields, tensors: Tensors) -> None:
        for key in keys:
            fields.pop(key, None)
            tensors.pop(key, None)

    return change


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (without("dflash.target_layers"), CheckpointError, r"does not state dflash\.target_layers.*never guessed"),
        (without("dflash.rope.freq_base"), CheckpointError, "dflash.rope.freq_base"),
        (without("dflash.block_size"), CheckpointError, "dflash.block_size"),
        (without("tokenizer.ggml.mask_token_id"), CheckpointError, "tokenizer.ggml.mask_token_id"),
        (without("tokenizer.ggml.tokens"), CheckpointError, "tokenizer.ggml.tokens"),
        (without("dflash.attention.key_length", "blk.0.attn_k_norm.weight"), CheckpointError, "key_length"),
        (lambda f, t: f.update({"dflash.mask_token_id": MASK}), UnsupportedModel, "before llama.cpp settled"),
        (lambda f, t: f.update({"dflash.target_hidden_size": 32}), UnsupportedModel, "before llama.cpp settled"),
        (lambda f, t: f.update({"dflash.hyper_connection_count": 4}), UnsupportedModel, "DeepSeek-V4"),
        (
            lambda f, t: f.update({"dflash.rope.scaling.type": "yarn", "dflash.rope.scaling.attn_factor": 2.0}),
            UnsupportedModel,
            r"scales attention by 2\.0",
        ),
        (lambda f, t: f.update({"dflash.rope.dimension_count": 4}), UnsupportedModel, "rotates 4 of 8"),
        (lambda f, t: t.update({"markov_w1.weight": np.ones((VOCAB, 4), np.float32)}), UnsupportedModel, "DSpark"),
        (lambda f, t: t.update({"d2t": np.zeros(9, np.int64)}), UnsupportedModel, "reduced-vocabulary"),
        (lambda f, t: t.update({"blk.0.attn_sinks.weight": np.ones(4, np.float32)}), UnsupportedModel, "attn_sinks"),
    ],
)
def test_refused(
    change: Callable[[Fields, Tensors], None],
    kind: type[DFlashError],
    message: str,
    network: DraftModel,
    tmp_path: Path,
) -> None:
    """Guards against a value that is guessed, and against kinds of drafts whose weights load but mean something else;
    each message says what to use instead, and nothing stays in the cache."""
    fields, tensors = stated(network), weights(network)
    change(fields, tensors)
    with pytest.raises(kind, match=message) as caught:
        translated_folder(write(tmp_path / "d.gguf", fields, tensors), cache=tmp_path)
    assert "hub id" in str(caught.value)
    assert not list((tmp_path / "drafts").rglob(CONFIG_FILE))


def test_head_width_is_taken_from_the_tensors(network: DraftModel, tmp_path: Path) -> None:
    """Files without key_length exist; the width of the key norm says the same."""
    fields = stated(network)
    del fields["dflash.attention.key_length"]
    folder = translated_folder(write(tmp_path / "d.gguf", fields, weights(network)), cache=tmp_path)
    assert read_draft_config(folder).head_dim == network.config.head_dim


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no GGUF at all" * 9], ids=["empty", "cut", "other"])
def test_damaged(content: bytes, tmp_path: Path) -> None:
    """A traceback of the reader's must not reach the user."""
    (tmp_path / "d.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"no readable GGUF file.*download it again"):
        translated_folder(tmp_path / "d.gguf", cache=tmp_path)


def test_other_models(network: DraftModel, tmp_path: Path) -> None:
    """A target, or a draft in a fork's own layout, is called what it is."""
    for architecture in ("llama", "dflash-draft", "dspark"):
        file = write(tmp_path / f"{architecture}.gguf", {}, {"x": np.ones(2, np.float32)}, architecture=architecture)
        with pytest.raises(UnsupportedModel, match=f"architecture '{architecture}'"):
            translated_folder(file, cache=tmp_path)
