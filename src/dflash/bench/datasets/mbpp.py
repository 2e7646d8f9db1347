"""MBPP, sanitized: short Python tasks in words, the test split. Asked as they are (so does the paper's benchmark)."""

from __future__ import annotations

from dflash.bench.datasets.base import DataSet

DATA_SET = DataSet(
    title="MBPP sanitized (test)",
    licence="CC BY 4.0",
    source="https://github.com/google-research/google-research/tree/master/mbpp",
    hub_id="google-research-datasets/mbpp",
    hub_config="sanitized",
    hub_split="test",
    file="mbpp_sanitized.jsonl",
    turns=lambda row: [row["prompt"]],
    row_id=lambda row, index: f"mbpp/{row['task_id']}",
)
