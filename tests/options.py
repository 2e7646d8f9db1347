"""Every logit-processing option of SamplingParams, once each and mixed: losslessness is tested over this table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dflash.types import SamplingParams

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.613},
    "min_p": {"min_p": 0.217},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 1.9},
    "negative_presence_penalty": {"presence_penalty": -1.1},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "logit_bias": {"logit_bias": {2: 1.5, 5: float("-inf"), 7: -0.5}},
    "mixed": {
        "top_k": 6,
        "top_p": 0.931,
        "min_p": 0.031,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {1: 2.0, 0: float("-inf")},
    },
}


def with_option(name: str, **other: Any) -> SamplingParams:
    """Parameters with one row of the table and any other fields."""
    return replace(SamplingParams(**other), **OPTIONS[name])
