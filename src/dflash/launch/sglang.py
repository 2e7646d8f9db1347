"""SGLang: the command that serves a target with its draft, and what SGLang refuses.

Facts are those of SGLang 0.5.23's source and of the model cards named in `recipes.py`: algorithm DFLASH covers
DFlash v1, DFlash 2 and Domino, DSPARK the drafts whose anchor slot predicts. SGLang is told the rows of a block, anchor
included. Taps are taken before the following layer, so a tap on the last layer needs a model file that has one more
place to look.
"""

from __future__ import annotations

from dflash.launch.drafts import ServedDraft
from dflash.launch.plan import LaunchRequest, Plan, given, merged, reachable, value_of
from dflash.launch.recipes import Recipe, recipe_for

DEFAULT_PORT = 30000

ALGORITHMS = {"dflash": "DFLASH", "dflash2": "DFLASH", "domino": "DFLASH", "dspark": "DSPARK", "eagle3": "EAGLE3"}
"""Kind of draft -> --speculative-algorithm."""

ALIASES = {
    "--model": "--model-path",
    "--speculative-draft-model": "--speculative-draft-model-path",
    "--tensor-parallel-size": "--tp-size",
    "--tp": "--tp-size",
}
_DRAFT_BACKENDS = {"nvidia": ("flashinfer", "fa3", "fa4", "trtllm_mha", "triton"), "amd": ("triton",), "cpu": ()}
_CUDA_ONLY = ("flashinfer", "fa3", "fa4", "flashmla", "trtllm_mla", "trtllm_mha", "cutedsl_mla")
_KEEPS_LAST_LAYER = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "GptOssForCausalLM",
    "Lfm2ForCausalLM",
    "NemotronHForCausalLM",
)
"""Target classes that also capture the output of their last layer; Llama's and Qwen's do not."""
_OURS = ("--speculative-algorithm", "--speculative-draft-model-path", "--speculative-draft-model")
_PIPELINE = ("--pp-size", "--pipeline-parallel-size", "--pp")
_DATA_PARALLEL_ATTENTION = "--enable-dp-attention"


def plan(request: LaunchRequest) -> Plan:
    """The command, its variables and what stands in the way."""
    recipe = recipe_for("sglang", request.platform, request.target.name)
    port = request.port or DEFAULT_PORT
    ours: dict[str, str | None] = {"--model-path": request.target.location, "--host": request.host, "--port": str(port)}
    if request.target.is_local:
        ours["--served-model-name"] = request.target.name
    if request.target.revision is not None:
        ours["--revision"] = request.target.revision
    if request.draft is not None:
        ours |= speculation(request, request.draft, recipe)
    if recipe is not None:
        ours |= recipe.flags
    host, port_text = value_of(request.flags, "--host"), value_of(request.flags, "--port")
    return Plan(
        engine="sglang",
        argv=(request.python or "python3", "-m", "sglang.launch_server", *merged(ours, request.flags, ALIASES)),
        env=_variables(request),
        url=f"http://{reachable(host or request.host)}:{port_text or port}",
        install="pip install sglang (in an environment of its own)",
        notes=tuple(_notes(request, recipe)),
        problems=tuple(_problems(request)),
    )


def speculation(request: LaunchRequest, draft: ServedDraft, recipe: Recipe | None) -> dict[str, str | None]:
    """The speculative flags."""
    most = draft.num_proposals + 1
    rows = most if request.width is None else min(request.width, most)
    flags: dict[str, str | None] = {
        "--speculative-algorithm": ALGORITHMS.get(draft.kind, "DFLASH"),
        "--speculative-draft-model-path": draft.location,
        "--speculative-num-draft-tokens": str(rows),
    }
    if draft.kind == "eagle3":  # a chain: one candidate per step, and as many steps as proposals
        flags |= {"--speculative-num-steps": str(rows - 1), "--speculative-eagle-topk": "1"}
    if draft.kind == "dspark" and rows < most:
        flags["--speculative-dspark-block-size"] = str(rows - 1)  # must agree with the rows, and is the longer one else
    if draft.revision is not None:
        flags["--speculative-draft-model-revision"] = draft.revision
    backend = request.draft_backend or (recipe.draft_backend if recipe is not None else None)
    if backend is None and request.platform == "amd":
        backend = "triton"  # the one backend on ROCm that a DFlash draft runs on; the target keeps AITER's
    if backend is not None:
        flags["--speculative-draft-attention-backend"] = backend
    return flags


def _variables(request: LaunchRequest) -> dict[str, str]:
    wanted = {"SGLANG_USE_AITER": "1"} if request.platform == "amd" else {}
    return {name: value for name, value in wanted.items() if name not in request.environment}


def _problems(request: LaunchRequest) -> list[str]:
    draft = request.draft
    if draft is None:
        return []
    found: list[str] = []
    if request.platform == "cpu":
        found.append("SGLang runs DFlash on GPUs only (sgl-project/sglang#36782); use vLLM or this package on a CPU")
    if draft.kind not in ALGORITHMS:
        found.append(
            f"SGLang has no algorithm for a draft of kind '{draft.kind}' (it runs {', '.join(sorted(ALGORITHMS))}); "
            "serve it with another engine, or decode with this package"
        )
    if _misses_last_layer(request):
        found.append(
            f"the draft taps the target's last layer, after which SGLang captures nothing in "
            f"{request.target.architecture}; serve it with vLLM, or train a draft without that tap"
        )
    found += _flag_problems(request, draft)
    return found


def _flag_problems(request: LaunchRequest, draft: ServedDraft) -> list[str]:
    found = []
    if given(request.flags, *_OURS):
        found.append(f"{', '.join(_OURS[:2])} are what this command writes; leave them out, or start SGLang yourself")
    stages = value_of(request.flags, *_PIPELINE)
    if stages not in (None, "1"):
        found.append("SGLang's DFLASH runs without pipeline parallelism; use --tp-size instead")
    if given(request.flags, _DATA_PARALLEL_ATTENTION) and not given(request.flags, "--enable-dp-lm-head"):
        found.append(f"SGLang's DFLASH needs --enable-dp-lm-head beside {_DATA_PARALLEL_ATTENTION}; add it")
    window = value_of(request.flags, "--speculative-draft-window-size")
    if window is not None and window.isdigit() and int(window) < draft.block_size:
        found.append(f"the draft's window of {window} tokens is smaller than its block of {draft.block_size}; raise it")
    return found + _backend_problems(request, draft)


def _backend_problems(request: LaunchRequest, draft: ServedDraft) -> list[str]:
    found = []
    spelled = "--speculative-draft-attention-backend"
    backend = value_of(request.flags, spelled) or request.draft_backend
    possible = _DRAFT_BACKENDS[request.platform]
    if backend is not None and possible and backend not in possible:
        found.append(
            f"attention backend '{backend}' does not run a DFlash draft on {request.platform}; "
            f"use {' or '.join(possible)}"
        )
    if backend == "trtllm_mha" and not (draft.all_sliding or draft.is_causal):
        found.append(
            "trtllm_mha runs drafts whose layers all slide or that are causal, and SGLang would quietly take another; "
            "use fa4 (Blackwell), fa3 (Hopper) or flashinfer"
        )
    target = value_of(request.flags, "--attention-backend")
    if request.platform == "amd" and target in _CUDA_ONLY:
        found.append(f"attention backend '{target}' exists on NVIDIA only; leave it out, or take aiter or triton")
    return found


def _misses_last_layer(request: LaunchRequest) -> bool:
    architecture = request.target.architecture
    return request.taps_last_layer and architecture is not None and architecture not in _KEEPS_LAST_LAYER


def _notes(request: LaunchRequest, recipe: Recipe | None) -> list[str]:
    notes = []
    if recipe is not None:
        notes.append(f"attention backends as documented in {recipe.source}")
        notes += [recipe.note] if recipe.note else []
    if request.draft is not None and request.draft.own_draft_vocabulary:
        notes.append(
            "the draft scores part of the vocabulary here and all of it in SGLang: same text, slightly other acceptance"
        )
    return notes
