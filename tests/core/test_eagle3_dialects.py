"""EAGLE-3 checkpoints of both layouts end in one description; old EAGLEs and misfits are refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash.core.draft_reader import DraftDescription, parse_draft_config, read_draft
from dflash.core.eagle3_config import Eagle3Config, Llama3Rope, tap_findings
from dflash.core.language_model import folder_is_language_model
from dflash.errors import CheckpointError, ModelError, PairError, UnsupportedModel
from dflash.launch.drafts import draft_by_config
from dflash.resolve import Source, resolve_draft
from tests.core.draft_folders import H, Tensors, V, write_draft
from tests.core.eagle3_cases import EXPECTED, LAYER, SAFEAILAB, SPECFORGE, K, held, speculators
from tests.launch.test_plans import plan_of, tiny


def table(offsets: np.ndarray[Any, Any] | None = None) -> dict[str, bytes]:
    """d2t and the t2d that belongs to it."""
    offsets = np.arange(K) + 3 if offsets is None else offsets
    ids = np.arange(K) + offsets
    kept = np.zeros(V, np.bool_)
    kept[ids[(ids >= 0) & (ids < V)]] = True
    return {"d2t": offsets.astype(np.int64).tobytes(), "t2d": kept.tobytes()}


def read(folder: Path, raw: dict[str, Any], tensors: Tensors, data: dict[str, bytes] | None = None) -> DraftDescription:
    return read_draft(write_draft(folder / "draft", raw, tensors, table() if data is None else data))


def test_safeailab(tmp_path: Path) -> None:
    """Fault: taps that are guessed without the target, a base of another family, a width of heads that is not the
    layer's, ids of the table shifted."""
    found = read(tmp_path, SAFEAILAB, held())
    assert (found.dialect, found.config) == ("eagle3", EXPECTED)
    assert found.vocabulary == tuple(range(3, 3 + 2 * K, 2))
    assert found.origins["rope_theta"] == "not stated: 10000, as SafeAILab's network"
    assert "n // 2" in found.origins["target_layer_ids"]
    assert found.for_target(32).config.target_layer_ids == (1, 15, 28)
    assert parse_draft_config(SAFEAILAB, source="x") == EXPECTED


def test_specforge_and_modelopt_list_outputs(tmp_path: Path) -> None:
    """Fault: reading SpecForge's list (outputs) like vLLM's (inputs). Their usual 1, 17, 32 of 36 layers are the very
    states that SafeAILab's rule takes there: the two numberings meet."""
    config = read(tmp_path, SPECFORGE, held()).config
    assert config.target_layer_ids == (1, 17, 32)
    assert EXPECTED.for_target(36).target_layer_ids == (1, 17, 32)


def test_the_top_level_lists_inputs(tmp_path: Path) -> None:
    """Fault: vLLM's list read as outputs: every tap one layer late."""
    raw = SAFEAILAB | {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}
    found = read(tmp_path, raw, held())
    assert found.config.target_layer_ids == (1, 17, 32)
    assert found.origins["target_layer_ids"].endswith("minus one")
    both = SPECFORGE | {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}
    assert parse_draft_config(both, source="x").target_layer_ids == (1, 17, 32)
    with pytest.raises(CheckpointError, match="different layers"):
        parse_draft_config(SPECFORGE | {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}, source="x")


def test_speculators(tmp_path: Path) -> None:
    """Fault: the target's tied embeddings taken for the draft's, the chain's length ignored, a norm switch unread."""
    found = read(tmp_path, speculators(), held("layers.0", verifier_norm__weight=(H,), embed_tokens__weight=(V, H)))
    assert found.dialect == "speculators-eagle3"
    config = found.config
    assert isinstance(config, Eagle3Config)
    assert (config.target_layer_ids, config.max_proposal, config.rope_theta) == ((1, 17, 32), 3, 1e6)
    assert config.norm_before_residual and config.owns_embedding and config.owns_head
    unlisted = parse_draft_config(speculators(eagle_aux_hidden_state_layer_ids=None), source="x")
    assert unlisted.target_layer_ids == ()
    assert unlisted.for_target(36).target_layer_ids == (1, 17, 32)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("scaling", "field", "value"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_factor", 2.0),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}, "rope_theta", 5e5),
        (
            {"rope_scaling": LLAMA3 | ORIGINAL},
            "llama3",
            Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
        ),
        ({"rope_scaling": {"type": "default"}}, "llama3", None),
    ],
)
def test_scaled_rope(scaling: dict[str, Any], field: str, value: object) -> None:
    """Fault: a scaling that is read over, which costs acceptance on long texts only."""
    assert getattr(parse_draft_config(SAFEAILAB | scaling, source="x"), field) == value


@pytest.mark.parametrize(
    ("scaling", "error", "words"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedModel, "dynamic"),
        ({"rope_scaling": LLAMA3}, CheckpointError, "original_max_position_embeddings'. It is never guessed"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": LLAMA3 | ORIGINAL},
            CheckpointError,
            "two different ways",
        ),
    ],
)
def test_unknown_scalings(scaling: dict[str, Any], error: type[Exception], words: str) -> None:
    """Fault: a scaling that is not here is left out, or completed with numbers of another model."""
    with pytest.raises(error, match=words):
        parse_draft_config(SAFEAILAB | scaling, source="x")


OLD_EAGLE = {**LAYER, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 5e5, "bias": False}
"""As yuhuili/EAGLE-LLaMA3-Instruct-8B: nothing in it says that it is no language model."""


def old_eagle() -> Tensors:
    layer = {name: entry for name, entry in held("layers.0").items() if name.startswith("layers.0.")}
    layer = {name: ("F16", tuple(H if size == 2 * H else size for size in shape)) for name, (_, shape) in layer.items()}
    return layer | {"fc.weight": ("F16", (H, 2 * H)), "embed_tokens.weight": ("F16", (V, H))}


@pytest.mark.parametrize("bias", [True, False])
def test_old_eagles_are_refused(bias: bool, tmp_path: Path) -> None:
    """Fault: EAGLE-1 and EAGLE-2, whose config is a language model's, are opened as one."""
    tensors = old_eagle() | ({"fc.bias": ("F16", (H,))} if bias else {})
    folder = write_draft(tmp_path / "draft", OLD_EAGLE, tensors)
    assert not folder_is_language_model(folder)
    with pytest.raises(UnsupportedModel, match=r"EAGLE-1 or EAGLE-2 draft.*runs EAGLE-3"):
        read_draft(folder)


def test_pickled_weights_are_named(tmp_path: Path) -> None:
    """Fault: a draft whose only weights are pickled (SafeAILab's own repositories) is opened as a language model, or
    unpickled."""
    for name, raw in (("old", OLD_EAGLE), ("new", SAFEAILAB)):
        folder = tmp_path / name
        write_draft(folder, raw, held())
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(ModelError, match=r"pickled weights only.*docs/drafts.md shows how"):
            resolve_draft(str(folder), Source(name="x", path=tmp_path))


def test_language_models_stay_language_models(tmp_path: Path) -> None:
    """Fault: the search for EAGLE's tensors takes a model of one layer, or one without safetensors, for a draft."""
    raw = {**LAYER, "architectures": ["LlamaForCausalLM"]}
    model = {f"model.{name}": entry for name, entry in old_eagle().items() if name != "fc.weight"}
    assert folder_is_language_model(write_draft(tmp_path / "draft", raw, model))
    bare = tmp_path / "bare"
    write_draft(bare, raw, model)
    (bare / "model.safetensors").unlink()
    assert folder_is_language_model(bare)


BAD: dict[str, tuple[dict[str, Any], Tensors, dict[str, bytes] | None, type[Exception], str]] = {
    "no fc": (SAFEAILAB, held(fc__weight=None), None, CheckpointError, "lacks fc.weight.*export the draft again"),
    "width of fc": (SAFEAILAB, held(fc__weight=(H, 2 * H)), None, CheckpointError, "fc reads 64 features.*3 taps"),
    "width of a projection": (
        SPECFORGE,
        held(midlayer__self_attn__k_proj__weight=(16, H)),
        None,
        CheckpointError,
        r"k_proj.weight has shape \[16, 32\], not \[16, 64\]",
    ),
    "d2t out of range": (SAFEAILAB, held(), table(np.full(K, V - 4)), CheckpointError, "entry 4 is 97, outside"),
    "d2t negative": (SAFEAILAB, held(), table(np.arange(K) - 1), CheckpointError, "entry 0 is -1, outside"),
    "d2t not increasing": (SAFEAILAB, held(), table(-np.arange(K)), CheckpointError, "entry 1 is 0, which stands"),
    "t2d of another": (SAFEAILAB, held(), table() | {"t2d": bytes(V)}, CheckpointError, "name different ids"),
    "no d2t": (SAFEAILAB, held(d2t=None), None, CheckpointError, "no table d2t.*export the draft again"),
    "no head": (
        SAFEAILAB,
        held(lm_head__weight=None),
        None,
        CheckpointError,
        "lacks lm_head.weight.*export the draft again",
    ),
    "d2t of a full head": (
        SAFEAILAB | {"draft_vocab_size": V},
        held(lm_head__weight=(V, H)),
        None,
        CheckpointError,
        "moves rows of a head that scores the whole",
    ),
    "tied head": (
        SAFEAILAB | {"draft_vocab_size": V, "tie_word_embeddings": True},
        held(lm_head__weight=None, embed_tokens__weight=(V, H), d2t=None, t2d=None),
        {},
        CheckpointError,
        "Store the head as lm_head.weight, or set tie_word_embeddings to false",
    ),
    "no embedding of its own width": (
        SAFEAILAB | {"target_hidden_size": 2 * H},
        held(fc__weight=(H, 6 * H)),
        None,
        CheckpointError,
        "cannot borrow.*lack embed_tokens.weight. Export",
    ),
    "biases that are not there": (
        SAFEAILAB | {"attention_bias": True},
        held(),
        None,
        CheckpointError,
        "lack biases in their attention",
    ),
    "quantised": (SAFEAILAB | {"quantization_config": {"bits": 4}}, held(), None, UnsupportedModel, "quantised"),
    "embedding output": (
        SAFEAILAB | {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]},
        held(),
        None,
        UnsupportedModel,
        "taps the embedding output",
    ),
    "unordered taps": (
        speculators(eagle_aux_hidden_state_layer_ids=[18, 2, 33]),
        held("layers.0"),
        None,
        CheckpointError,
        "increasing",
    ),
    "window": (
        SAFEAILAB | {"layer_types": ["sliding_attention"], "sliding_window": 64},
        held(),
        None,
        UnsupportedModel,
        "sliding window",
    ),
    "no taps used": (
        SAFEAILAB | {"eagle_config": {"use_aux_hidden_state": False}},
        held(),
        None,
        UnsupportedModel,
        "instead of taps",
    ),
    "latent attention": (
        SAFEAILAB | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        held(midlayer__self_attn__kv_a_proj_with_mqa__weight=(16, H)),
        None,
        UnsupportedModel,
        "latent attention",
    ),
    "two norms before fc": (
        speculators(norm_before_fc=True, fc_norm=True),
        held("layers.0"),
        None,
        CheckpointError,
        "keep the one the draft was trained with",
    ),
    "another algorithm": (
        speculators(speculators_model_type="peagle"),
        held("layers.0"),
        None,
        CheckpointError,
        r"algorithms \['eagle3', 'peagle'\]",
    ),
    "lossy acceptance": (
        speculators(speculators_config={"algorithm": "eagle3", "proposal_methods": [{"verifier_accept_k": 2}]}),
        held("layers.0"),
        None,
        UnsupportedModel,
        "lossy acceptance",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints_name_the_cure(case: str, tmp_path: Path) -> None:
    """Fault: a draft with a hole, or read as another: the text stays right and only the speed is gone."""
    raw, tensors, data, error, words = BAD[case]
    with pytest.raises(error, match=words):
        read(tmp_path, raw, tensors, data)


def test_taps_of_a_shallow_target() -> None:
    """Fault: the usual three taps fall together, and fc is fed two of them."""
    with pytest.raises(PairError, match=r"no three layers of a target of 6.*eagle_aux_hidden_state_layer_ids"):
        EXPECTED.for_target(6)
    assert EXPECTED.for_target(7).target_layer_ids == (1, 2, 3)


def test_what_serving_engines_are_told() -> None:
    """Fault: an EAGLE-3 draft served by the method of block drafts, or in a layout that the engine does not read."""
    ours, theirs = draft_by_config(SAFEAILAB, "a/b"), draft_by_config(speculators(), "a/b")
    assert (ours.kind, ours.num_proposals, ours.target_layer_ids) == ("eagle3", 7, None)
    assert (theirs.kind, theirs.num_proposals, theirs.target_layer_ids) == ("speculators-eagle3", 3, (1, 17, 32))
    for draft, steps in ((ours, 7), (theirs, 3)):
        plan = plan_of("vllm", tiny(draft=draft))
        assert not plan.problems
        assert f'"method": "eagle3", "model": "a/b", "num_speculative_tokens": {steps}' in " ".join(plan.argv)
    words = " ".join(plan_of("sglang", tiny(draft=ours)).argv)
    assert "--speculative-algorithm EAGLE3" in words
    assert "--speculative-num-draft-tokens 8 --speculative-num-steps 7 --speculative-eagle-topk 1" in words
    assert any("speculators-eagle3" in problem for problem in plan_of("sglang", tiny(draft=theirs)).problems)


def test_a_list_that_was_moved_unchanged_is_doubted() -> None:
    """Fault: published conversions carry SpecForge's outputs ([1, 46, 90] of 94 layers) where inputs are meant, and
    nobody is told why the draft accepts less. A list that means what it says is not doubted."""
    moved = parse_draft_config(speculators(eagle_aux_hidden_state_layer_ids=[1, 46, 90]), source="x")
    (finding,) = tap_findings(moved.for_target(94), 94)
    assert finding.severity == "warning"
    assert "without adding one" in finding.message
    for raw in (speculators(), SPECFORGE, SAFEAILAB):
        assert tap_findings(parse_draft_config(raw, source="x").for_target(36), 36) == []
