"""The few requests that the tests of real engines need, with nothing but the standard library: an independent reader of
vLLM's answers and counters, so that a fault of the benchmark's own client cannot hide."""

from __future__ import annotations

import json
import re
import urllib.request
from dataclasses import dataclass
from typing import Any

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@dataclass(frozen=True)
class Served:
    """One greedy answer."""

    text: str
    token_ids: list[int]
    prompt_ids: list[int]


def ask(url: str, model: str, prompt: str, max_tokens: int) -> Served:
    """One chat answer at temperature 0."""
    answer = _post(
        f"{url}/v1/chat/completions",
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        },
    )
    choice = answer["choices"][0]
    return Served(choice["message"]["content"], choice["token_ids"], answer["prompt_token_ids"])


def counters(url: str) -> dict[str, int]:
    """vLLM's totals of speculation since it started."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        page: str = answer.read().decode()
    found = {}
    for name in COUNTERS:
        values = re.findall(rf"^vllm:spec_decode_{name}_total(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
        found[name] = round(sum(float(value) for value in values))
    return found


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        read: dict[str, Any] = json.loads(answer.read())
    return read
