"""Requests that cannot be meant are refused when they are made, in words."""

from __future__ import annotations

from typing import Any

import pytest

from dflash.errors import ConfigError
from dflash.types import SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": NAN},
        {"temperature": INF},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": NAN},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": INF},
        {"presence_penalty": NAN},
        {"frequency_penalty": -INF},
        {"seed": -1},
        {"seed": 2**63},
        {"stop": ("",)},
        {"stop": "END"},
    ],
    ids=str,
)
def test_parameters_out_of_range(wrong: dict[str, Any]) -> None:
    """Guards against NaN that blames the target's logits later, and a single stop string taken letter by letter."""
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**wrong)
