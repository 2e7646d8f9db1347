"""MATH-500: 500 competition problems of MATH's test split, chosen by the authors of PRM800K."""

from __future__ import annotations

from dflash.bench.datasets.base import DataSet
from dflash.bench.datasets.gsm8k import BOXED

DATA_SET = DataSet(
    title="MATH-500",
    licence="MIT",
    source="https://github.com/openai/prm800k",
    hub_id="HuggingFaceH4/MATH-500",
    hub_config=None,
    hub_split="test",
    file="math500.jsonl",
    turns=lambda row: [row["problem"]],
    row_id=lambda row, index: str(row["unique_id"]),
    prompt=lambda turn: f"{turn}\n{BOXED}",
)
