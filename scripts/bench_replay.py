"""Times the two ways of taking rejected rows out of recurrent layers: feeding the kept rows to the whole model again,
and running the recurrences alone on their recorded inputs (src/dflash/backends/torch/replay.py).

    python scripts/bench_replay.py [--threads 2] [--layers 8] [--hidden 768] [--block 16]

A random Qwen3.5-like model in float32 on the CPU; medians of alternating runs. One JSON record per kept count and a
last one with the ratio over all counts 1 .. block - 1 (each equally often).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from dflash.backends.torch.packing import pack_linears
from dflash.backends.torch.target import TorchTarget
from dflash.types import Proposal

PROMPT_LENGTH = 128


def build(num_layers: int, hidden: int) -> PreTrainedModel:
    """Three recurrent layers to one with attention, heads of 128, as the published models have."""
    config = Qwen3_5TextConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=max(1, hidden // 128),
        num_key_value_heads=max(1, hidden // 256),
        head_dim=128,
        linear_num_key_heads=max(1, hidden // 128),
        linear_num_value_heads=max(1, hidden // 128),
        layer_types=["full_attention" if index % 4 == 3 else "linear_attention" for index in range(num_layers)],
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    model: PreTrainedModel = Qwen3_5ForCausalLM(config)
    model.eval()
    pack_linears(model)
    return model


def rounds(model: PreTrainedModel, block: int, kept: int, repeats: int, *, replays: bool) -> tuple[float, float]:
    """Median milliseconds of (verify, commit) for blocks of which `kept` rows are kept."""
    target = TorchTarget(model, replays=replays)
    session = target.session(exact=False, features=False)
    tokens = torch.randint(32000, (PROMPT_LENGTH + block,), generator=torch.Generator().manual_seed(1)).tolist()
    session.prefill(tokens[:PROMPT_LENGTH])
    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        session.verify(tokens[-1], Proposal(tuple(tokens[-block:-1])))
        verified = time.perf_counter()
        session.commit(range(kept))
        times.append((verified - started, time.perf_counter() - verified))
    target.close()
    verify, commit = (1000 * statistics.median(part) for part in zip(*times[2:], strict=True))
    return verify, commit


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("threads", 2), ("layers", 8), ("hidden", 768), ("block", 16), ("repeats", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = build(options.layers, options.hidden)
    totals = {True: 0.0, False: 0.0}
    for kept in range(1, options.block):
        record: dict[str, Any] = {"block": options.block, "kept": kept}
        for replays in (True, False):
            verify, commit = rounds(model, options.block, kept, options.repeats, replays=replays)
            record["replay" if replays else "feed_again"] = {
                "verify_ms": round(verify, 2),
                "commit_ms": round(commit, 2),
            }
            totals[replays] += commit
        print(json.dumps(record), flush=True)
    summary = {
        "model": f"random Qwen3.5, {options.layers} layers of {options.hidden}, float32, CPU",
        "threads": options.threads,
        "torch": torch.__version__,
        "replay_ms": round(totals[True] / (options.block - 1), 2),
        "feed_again_ms": round(totals[False] / (options.block - 1), 2),
        "ratio": round(totals[False] / totals[True], 2),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
