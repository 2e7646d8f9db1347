"""What an engine cannot serve is said before it is started, with what to do instead; what it can is not refused."""

from __future__ import annotations

import dataclasses

import pytest

from dflash.launch.drafts import SLIDING, ServedDraft
from dflash.launch.plan import LaunchRequest
from tests.launch.test_plans import DRAFT, LLAMA, plan_of, tiny

FULL = "full_attention"
SLIDES = (SLIDING, SLIDING)
MIXED = (SLIDING, FULL)
LAST = dataclasses.replace(DRAFT, target_layer_ids=(1, 29))


def draft(**changes: object) -> ServedDraft:
    return dataclasses.replace(DRAFT, **changes)  # type: ignore[arg-type]


REFUSED: dict[str, tuple[str, LaunchRequest, str]] = {
    "kind without a method": ("vllm", tiny(draft=draft(kind="domino")), "domino"),
    "kind of another engine": ("sglang", tiny(draft=draft(kind="dspine")), "dspine"),
    "mixed windows on a CPU": ("vllm", tiny(draft=draft(layer_types=MIXED), platform="cpu"), "mixes"),
    "candidate head on a CPU": ("vllm", tiny(draft=draft(kind="dflash2"), platform="cpu"), "dflash2"),
    "causal-only draft backend": ("vllm", tiny(draft_backend="rocm_aiter_unified_attn", platform="amd"), "directions"),
    "CUDA backend on ROCm": ("vllm", tiny(flags=("--attention-backend", "FLASH_ATTN"), platform="amd"), "NVIDIA only"),
    "CUDA draft backend on ROCm": ("vllm", tiny(draft_backend="flash_attn", platform="amd"), "rocm_attn"),
    "our own flag": ("vllm", tiny(flags=("--speculative-config={}",)), "--width"),
    "our own flags": ("sglang", tiny(flags=("--speculative-algorithm", "EAGLE")), "leave them out"),
    "SGLang on a CPU": ("sglang", tiny(platform="cpu"), "GPUs only"),
    "last layer": ("sglang", tiny(draft=LAST), "last layer"),
    "pipeline": ("sglang", tiny(flags=("--pp-size", "2")), "pipeline"),
    "data-parallel attention": ("sglang", tiny(flags=("--enable-dp-attention",)), "--enable-dp-lm-head"),
    "window below block": ("sglang", tiny(flags=("--speculative-draft-window-size=4",)), "smaller"),
    "aiter for the draft": ("sglang", tiny(draft_backend="aiter", platform="amd"), "triton"),
    "fa3 on ROCm": ("sglang", tiny(flags=("--attention-backend=fa3",), platform="amd"), "NVIDIA only"),
    "trtllm_mha, full layers": ("sglang", tiny(draft_backend="trtllm_mha"), "quietly"),
    "trtllm_mha, mixed": ("sglang", tiny(draft=draft(layer_types=MIXED), draft_backend="trtllm_mha"), "quietly"),
}

ACCEPTED: dict[str, tuple[str, LaunchRequest]] = {
    "plain": ("vllm", tiny()),
    "on a CPU": ("vllm", tiny(platform="cpu")),
    "mixed windows on a GPU": ("vllm", tiny(draft=draft(layer_types=MIXED))),
    "all sliding on a CPU": ("vllm", tiny(draft=draft(layer_types=SLIDES), platform="cpu")),
    "candidate head on a GPU": ("vllm", tiny(draft=draft(kind="dflash2"), platform="amd")),
    "last layer in vLLM": ("vllm", tiny(draft=LAST)),
    "any case": ("vllm", tiny(draft_backend="FLASH_ATTN")),
    "AITER on ROCm": ("vllm", tiny(draft_backend="rocm_aiter_fa", platform="amd")),
    "last layer of gpt-oss": (
        "sglang",
        tiny(draft=LAST, target=dataclasses.replace(LLAMA, architecture="GptOssForCausalLM")),
    ),
    "one stage": ("sglang", tiny(flags=("--pp-size", "1", "--tp-size", "8"))),
    "data-parallel attention": ("sglang", tiny(flags=("--enable-dp-attention", "--enable-dp-lm-head"))),
    "trtllm_mha, all sliding": ("sglang", tiny(draft=draft(layer_types=SLIDES), draft_backend="trtllm_mha")),
    "trtllm_mha, causal": ("sglang", tiny(draft=draft(is_causal=True), draft_backend="trtllm_mha")),
    "flashinfer": ("sglang", tiny(draft_backend="flashinfer")),
    "domino": ("sglang", tiny(draft=draft(kind="domino"))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """Guards against minutes of loading that end in an engine's traceback, or in silence at a tenth of the speed."""
    engine, request, word = REFUSED[case]
    (problem,) = plan_of(engine, request).problems
    assert word in problem
    assert len(problem.splitlines()) == 1


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case: str) -> None:
    """Guards against refusing what works."""
    engine, request = ACCEPTED[case]
    assert plan_of(engine, request).problems == ()


def test_what_the_engine_does_otherwise_is_said() -> None:
    """Guards against a surprise about acceptance: engines score the whole vocabulary."""
    reduced = draft(own_draft_vocabulary=True)
    for engine in ("vllm", "sglang"):
        assert any("vocabulary" in note for note in plan_of(engine, tiny(draft=reduced)).notes)
        assert not any("vocabulary" in note for note in plan_of(engine, tiny()).notes)
    assert any("before the final norm" in note for note in plan_of("vllm", tiny(draft=LAST)).notes)
    assert not any("final norm" in note for note in plan_of("vllm", tiny()).notes)
    assert any("greedy" in note for note in plan_of("vllm", tiny(platform="cpu")).notes)
