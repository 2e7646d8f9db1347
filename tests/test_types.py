"""Requests that cannot be meant are refused when they are made, in words."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from dflash.errors import ConfigError
from dflash.types import Drafting, SamplingParams

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
        {"stop_token_ids": (3, -1)},
    ],
    ids=str,
)
def test_parameters_out_of_range(wrong: dict[str, Any]) -> None:
    """Guards against NaN that blames the target's logits later, and a single stop string taken letter by letter."""
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**wrong)


WRONG_TYPES = {
    "max_new_tokens": (1.5, "5", None, True),
    "temperature": ("a", None, True, [0.5]),
    "top_k": (2.0, "2"),
    "top_p": ("0.9",),
    "min_p": (None,),
    "repetition_penalty": ("1",),
    "presence_penalty": ((),),
    "frequency_penalty": ("x",),
    "logit_bias": ([5], "5=1", {"5": 1.0}, {5: "a"}, {5.0: 1.0}, None),
    "seed": (1.0, "x", None),
    "stop_token_ids": (5, "5", [1.5], [True], {5: 1}, None, ["a"]),
    "stop": (5, None, [5], b"END", {"END": 1}),
    "ignore_eos": (1, "no", None),
}
WRONG_CHOICES = {
    "mode": ("best", 1, None, ["fast"]),
    "fixed": (1, "yes"),
    "copies": (None,),
    "bigrams": (1, "no"),
    "draws": (0,),
    "steady": ("no",),
    "width": (8.0, "8", True),
    "draft_window": ("all", 1.0),
}


def cases(table: dict[str, tuple[Any, ...]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def test_every_field_has_a_wrong_type() -> None:
    """Guards against a new field that is not looked at."""
    assert set(WRONG_TYPES) == {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(WRONG_CHOICES) == {field.name for field in dataclasses.fields(Drafting)}


@pytest.mark.parametrize(("name", "value"), cases(WRONG_TYPES), ids=str)
def test_parameters_of_another_type(name: str, value: Any) -> None:
    """Guards against a bare TypeError, from here or from deep inside a round."""
    with pytest.raises(ConfigError, match=rf"^{name} .*must|^{name} must"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), cases(WRONG_CHOICES), ids=str)
def test_choices_of_another_type(name: str, value: Any) -> None:
    """Guards against a mistyped mode that drafts as if nothing had been said."""
    with pytest.raises(ConfigError, match=rf"^{name} must be "):
        Drafting(**{name: value})


def test_numbers_of_numpy_are_numbers() -> None:
    """Guards against refusing what works: values that come out of arrays, lists of any kind."""
    ids = np.array([3, 4])
    params = SamplingParams(
        max_new_tokens=np.int64(5),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=1,
        logit_bias={ids[0]: np.float64(1.0)},
        stop_token_ids=ids,  # type: ignore[arg-type]
        stop=["a", "b"],
    )
    assert list(params.stop_token_ids) == [3, 4]


def test_long_values_are_not_repeated() -> None:
    """Guards against an error that shows a whole prompt."""
    with pytest.raises(ConfigError, match="must be a number, not a str"):
        SamplingParams(temperature="x" * 1000)  # type: ignore[arg-type]
