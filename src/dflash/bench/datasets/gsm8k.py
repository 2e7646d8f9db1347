"""GSM8K: grade-school maths in words, the test split."""

from __future__ import annotations

from dflash.bench.datasets.base import DataSet

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
"""Suffix of the maths sets in the DFlash paper's benchmark (arXiv:2602.06036)."""

DATA_SET = DataSet(
    title="GSM8K (test)",
    licence="MIT",
    source="https://github.com/openai/grade-school-math",
    hub_id="openai/gsm8k",
    hub_config="main",
    hub_split="test",
    file="gsm8k.jsonl",
    turns=lambda row: [row["question"]],
    row_id=lambda row, index: f"gsm8k/test/{index}",
    prompt=lambda turn: f"{turn}\n{BOXED}",
)
