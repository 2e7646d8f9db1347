"""The MLX engine beside mlx-lm's own greedy generation and beside PyTorch, prompt by prompt, in float32.

`python scripts/compare_mlx.py [--target NAME] [--prompts FILE] [--limit N] [-n N] [--repeats N] [--no-torch]` prints
one JSON record: whether the tokens are mlx-lm's, acceptance lengths of the fixed chain on both backends, tokens per
second, and the share of a round that is neither draft nor verify forward. Speeds and shares mean something on a quiet
machine only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dflash import SamplingParams, load
from dflash.core.engine import Engine
from dflash.registry import backend_loader
from dflash.types import Drafting, Result

FIXED = Drafting(fixed=True)


def compare(
    target: str, draft: str, prompts: Sequence[Any], *, max_new_tokens: int, repeats: int = 1, torch: bool = True
) -> dict[str, Any]:
    """The record. `prompts`: what `Engine.tokenize` takes."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    engine: Engine = backend_loader("mlx")(target, draft, dtype="float32")
    rows = [_on_mlx(engine, prompt, params, repeats) for prompt in prompts]
    engine.close()
    record: dict[str, Any] = {
        "target": target,
        "draft": engine.info.draft,
        "draft_sha256": engine.info.draft_sha256,
        "exact": engine.info.exact,
        "max_new_tokens": max_new_tokens,
    }
    if torch:
        other = load(target, draft, dtype="float32", device="cpu", drafting=FIXED)
        for prompt, row in zip(prompts, rows, strict=True):
            result = other.generate(prompt, params)
            row["torch_acceptance_length"] = result.stats.acceptance_length
            row["same_as_torch"] = result.token_ids == row["token_ids"]
        other.close()
    record["mlx"] = {
        "same_as_mlx_lm": all(row["same_as_mlx_lm"] for row in rows),
        "overhead_share": statistics.mean(row["overhead_share"] for row in rows),
        "acceptance_length": statistics.mean(row["acceptance_length"] for row in rows),
        "tokens_per_second": {
            name: statistics.harmonic_mean([row["tokens_per_second"][name] for row in rows])
            for name in rows[0]["tokens_per_second"]
        },
    }
    if torch:
        record["torch"] = {"acceptance_length": statistics.mean(row["torch_acceptance_length"] for row in rows)}
    return record | {"prompts": rows}


def _on_mlx(engine: Engine, prompt: Any, params: SamplingParams, repeats: int) -> dict[str, Any]:
    ids = engine.tokenize(prompt)
    expected = mlx_lm_greedy(engine, ids, params.max_new_tokens)
    forms: dict[str, dict[str, Any]] = {
        "plain": {"use_draft": False, "exact": False},
        "plain_exact": {"use_draft": False},
        "fixed": {"drafting": FIXED},
        "default": {"drafting": Drafting()},
    }
    speeds: dict[str, list[float]] = {name: [] for name in forms}
    results: dict[str, Result] = {}
    for _ in range(repeats):
        for name, options in forms.items():
            results[name] = engine.generate(prompt, params, **options)
            speeds[name].append(results[name].stats.decode_tokens_per_second)
    # Its own run: waiting for the device at every reading of the clock would spoil the speed.
    with closing(engine.stream(prompt, params, drafting=FIXED, profile=True)) as stream:
        profiled = [event.stats for event in stream][-1]
    return {
        "prompt": prompt if isinstance(prompt, str) else prompt[-1]["content"],
        "token_ids": expected,
        "same_as_mlx_lm": {name: result.token_ids for name, result in results.items()}
        == dict.fromkeys(results, expected),
        "acceptance_length": results["fixed"].stats.acceptance_length,
        "default_acceptance_length": results["default"].stats.acceptance_length,
        "overhead_share": profiled.overhead_seconds / profiled.decode_seconds,
        "draft_share": profiled.draft_seconds / profiled.decode_seconds,
        "tokens_per_second": {name: statistics.median(values) for name, values in speeds.items()},
    }


def mlx_lm_greedy(engine: Engine, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """What `mlx_lm.stream_generate` says to these ids with the engine's weights, its end token included."""
    from mlx_lm import stream_generate
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    target: Any = engine.target
    tokenizer = TokenizerWrapper(engine.tokenizer, eos_token_ids=sorted(engine.eos_ids))
    return [
        int(response.token)
        for response in stream_generate(target.model, tokenizer, list(prompt_ids), max_tokens=max_new_tokens)
    ]


def main() -> None:
    """Read the command line, print the record."""
    from dflash.cli.demo import questions

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--prompts", type=Path, help='JSONL with a "prompt" per line (default: the demo\'s)')
    parser.add_argument("--limit", type=int)
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    given = parser.parse_args()
    asked = [prompt.opening() for prompt in questions(given.prompts, given.limit)]
    found = compare(
        given.target,
        given.draft,
        asked,
        max_new_tokens=given.max_new_tokens,
        repeats=given.repeats,
        torch=not given.no_torch,
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
