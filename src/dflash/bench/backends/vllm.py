"""vLLM's server: as `openai.py`, with token ids in the answers and acceptance from its Prometheus counters.

The counters are of the whole server, so somebody else's requests would be counted, too: measure a server that nobody
else uses. vLLM counts a round ("draft") whenever it verified a proposal; steps without one are not among them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dflash.bench.backends.openai import KNOWN, OpenAiBackend
from dflash.bench.protocol import BackendOptions, RequestFailed, Rounds
from dflash.resolve import Progress

_PREFIX = "vllm:spec_decode_num_"
_LINE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'position="(\d+)"')


def open_backend(options: BackendOptions, progress: Progress) -> VllmBackend:
    """Find the servers. Raises RequestFailed if one does not answer, and ConfigError."""
    options.refuse_others("vllm", *KNOWN)
    return VllmBackend(options, progress)


class VllmBackend(OpenAiBackend):
    """Implements `dflash.bench.protocol.Backend`."""

    def engine(self) -> str:
        """vLLM and its version, of the first server."""
        try:
            version = next(iter(self.servers.values())).get_json("/version")["version"]
        except (RequestFailed, KeyError, TypeError):
            return "vLLM (its version was not told)"
        return f"vLLM {version}"

    def acceptance_notes(self) -> list[str]:
        """The counters' unit, or that there are none."""
        told = [form for form in self.servers if self.counters(form) is not None]
        if "speculative" in self.servers and "speculative" not in told:
            return ["The server at --url has no counters of speculation in /metrics: acceptance is missing."]
        return ["Acceptance comes from the server's counters, over everything that it answered meanwhile."]

    def extra_body(self) -> dict[str, Any]:
        """Ask for token ids, so that outputs can be compared token by token."""
        return {"return_token_ids": True}

    def counters(self, form: str) -> Rounds | None:
        """The totals of /metrics; None if the server does not speculate."""
        return parse_counters(self.servers[form].get("/metrics").text)


def parse_counters(text: str) -> Rounds | None:
    """The totals in a Prometheus page, summed over engines; None without them."""
    totals: dict[str, float] = {}
    slots: dict[int, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or not match["name"].startswith(_PREFIX):
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        name = match["name"].removeprefix(_PREFIX).removesuffix("_total")
        position = _POSITION.search(match["labels"] or "")
        if name == "accepted_tokens_per_pos" and position is not None:
            slots[int(position[1])] = slots.get(int(position[1]), 0.0) + value
        else:
            totals[name] = totals.get(name, 0.0) + value
    return _rounds(totals, slots)


def _rounds(totals: Mapping[str, float], slots: Mapping[int, float]) -> Rounds | None:
    if "drafts" not in totals or "accepted_tokens" not in totals:
        return None
    rounds, accepted = int(totals["drafts"]), int(totals["accepted_tokens"])
    per_slot = [int(slots.get(position, 0)) for position in range(max(slots, default=-1) + 1)]
    return Rounds(
        num_rounds=rounds,
        num_tokens=rounds + accepted,
        num_proposed=int(totals["draft_tokens"]) if "draft_tokens" in totals else None,
        num_accepted=accepted,
        proposed_per_slot=[rounds] * len(per_slot) if slots else None,
        accepted_per_slot=per_slot if slots else None,
    )
