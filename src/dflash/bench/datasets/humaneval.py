"""HumanEval: Python functions to be completed from signature and docstring."""

from __future__ import annotations

from dflash.bench.datasets.base import DataSet

TASK = "Write a solution to the following problem and make sure that it passes the tests:"
"""As in the DFlash paper's benchmark (arXiv:2602.06036)."""

DATA_SET = DataSet(
    title="HumanEval",
    licence="MIT",
    source="https://github.com/openai/human-eval",
    hub_id="openai/openai_humaneval",
    hub_config=None,
    hub_split="test",
    file="humaneval.jsonl",
    turns=lambda row: [row["prompt"]],
    row_id=lambda row, index: str(row["task_id"]),
    prompt=lambda turn: f"{TASK}\n```python\n{turn}\n```",
)
