"""MT-Bench: 80 open questions of eight kinds in two turns; the second builds on the model's own answer to the first."""

from __future__ import annotations

from dflash.bench.datasets.base import DataSet

DATA_SET = DataSet(
    title="MT-Bench",
    licence="Apache-2.0",
    source="https://github.com/lm-sys/FastChat",
    hub_id="HuggingFaceH4/mt_bench_prompts",
    hub_config=None,
    hub_split="train",
    file="mt_bench.jsonl",
    turns=lambda row: row["prompt"],
    row_id=lambda row, index: f"mt_bench/{row['prompt_id']}",
)
