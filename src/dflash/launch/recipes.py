"""Flags that certain targets need beside a draft, each with the public source that documents them.

Only what their authors published or the engine's own source says; nothing is tuned here. Memory, parallelism and
quantisation are the user's, after `--`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What one target takes on one engine and kind of machine."""

    flags: Mapping[str, str] = field(default_factory=lambda: _NONE)
    draft_backend: str | None = None
    """Attention backend of the draft; None: the engine's choice."""
    source: str
    note: str | None = None


_CARD = "model card of {draft}".format
_VLLM_SPLIT = "vllm-project/vllm#39930"
_REMOTE_CODE = (
    "moonshotai/Kimi-K2.5 brings Python code that the engine may ask to run: read it, then add `--trust-remote-code` "
    "after `--`."
)
_FLASH = {"--attention-backend": "flash_attn"}

RECIPES: Mapping[tuple[str, str, str], Recipe] = MappingProxyType(
    {
        ("vllm", "nvidia", "Qwen/Qwen3-4B"): Recipe(
            flags=_FLASH, draft_backend="flash_attn", source=_CARD(draft="z-lab/Qwen3-4B-DFlash-b16")
        ),
        ("vllm", "nvidia", "Qwen/Qwen3-8B"): Recipe(
            flags=_FLASH, draft_backend="flash_attn", source=_CARD(draft="z-lab/Qwen3-8B-DFlash-b16")
        ),
        ("vllm", "nvidia", "Qwen/Qwen3.5-27B"): Recipe(
            flags=_FLASH, draft_backend="flash_attn", source=_CARD(draft="z-lab/Qwen3.5-27B-DFlash")
        ),
        ("vllm", "nvidia", "openai/gpt-oss-120b"): Recipe(
            flags=_FLASH, draft_backend="flash_attn", source=_CARD(draft="z-lab/gpt-oss-20b-DFlash")
        ),
        ("vllm", "nvidia", "google/gemma-4-31B-it"): Recipe(
            flags={"--attention-backend": "triton_attn"},
            draft_backend="flash_attn",
            source=_CARD(draft="z-lab/gemma-4-31B-it-DFlash"),
        ),
        ("vllm", "nvidia", "moonshotai/Kimi-K2.5"): Recipe(
            # The target's attention is latent (MLA) and the draft's is not: each has its own backend.
            draft_backend="flash_attn",
            source=_VLLM_SPLIT,
            note=_REMOTE_CODE,
        ),
        ("vllm", "amd", "google/gemma-4-31B-it"): Recipe(
            flags={"--attention-backend": "triton_attn"}, source=_CARD(draft="z-lab/gemma-4-31B-it-DFlash")
        ),
        ("vllm", "amd", "moonshotai/Kimi-K2.5"): Recipe(source="vllm-project/vllm#40632", note=_REMOTE_CODE),
        ("sglang", "nvidia", "google/gemma-4-31B-it"): Recipe(
            flags={"--attention-backend": "triton"},
            draft_backend="fa4",
            source=_CARD(draft="z-lab/gemma-4-31B-it-DFlash"),
        ),
        ("sglang", "nvidia", "moonshotai/Kimi-K2.5"): Recipe(
            flags={"--attention-backend": "trtllm_mla", "--speculative-draft-window-size": "4096"},
            draft_backend="fa4",
            source=_CARD(draft="z-lab/Kimi-K2.5-DFlash"),
            note=f"trtllm_mla and fa4 are for Blackwell; on Hopper name others after `--`. {_REMOTE_CODE}",
        ),
        ("sglang", "amd", "google/gemma-4-31B-it"): Recipe(
            flags={"--attention-backend": "triton"}, source=_CARD(draft="z-lab/gemma-4-31B-it-DFlash")
        ),
        ("sglang", "amd", "moonshotai/Kimi-K2.5"): Recipe(source="sgl-project/sglang#22342", note=_REMOTE_CODE),
    }
)
"""(engine, platform, target hub id) -> recipe. A target that is not listed gets the engine's own choices."""


def recipe_for(engine: str, platform: str, target: str) -> Recipe | None:
    """The recipe of a target by the name the user gave, without a revision."""
    return RECIPES.get((engine, platform, target))
