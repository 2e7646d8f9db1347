"""SGLang's server: as `openai.py`, with acceptance from the `meta_info` of its answers.

Written from SGLang's documents and recorded answers; it has not been run against a real SGLang server here, which needs
a GPU. `spec_verify_ct` counts verifications, `spec_accept_histogram[n]` those that accepted n draft tokens,
`spec_accept_length` is tokens per verification.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash.bench.backends.openai import KNOWN, OpenAiBackend, Reply
from dflash.bench.protocol import BackendOptions, RequestFailed, Rounds
from dflash.resolve import Progress

_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
_INFO_PATHS = ("/server_info", "/get_server_info")
"""Newer and older versions."""


def open_backend(options: BackendOptions, progress: Progress) -> SglangBackend:
    """Find the servers. Raises RequestFailed if one does not answer, and ConfigError."""
    options.refuse_others("sglang", *KNOWN)
    return SglangBackend(options, progress)


class SglangBackend(OpenAiBackend):
    """Implements `dflash.bench.protocol.Backend`."""

    def engine(self) -> str:
        """SGLang and its version, of the first server."""
        server = next(iter(self.servers.values()))
        for path in _INFO_PATHS:
            try:
                return f"SGLang {server.get_json(path)['version']}"
            except (RequestFailed, KeyError, TypeError):
                continue
        return "SGLang (its version was not told)"

    def acceptance_notes(self) -> list[str]:
        """Where acceptance comes from."""
        return ["Acceptance comes from each answer's meta_info; where an answer has none, it is missing."]

    def extra_body(self) -> dict[str, Any]:
        """Ask for `meta_info`."""
        return {"return_meta_info": True}

    def rounds(self, reply: Reply) -> Rounds | None:
        """What `meta_info` tells; None without speculation."""
        return rounds_of_meta(reply.meta, reply.usage.get("completion_tokens"))


def rounds_of_meta(meta: Mapping[str, Any], completion_tokens: int | None) -> Rounds | None:
    """Rounds of one answer. The histogram is exact; without it, tokens are those after the prefill's first one."""
    histogram = next((meta[name] for name in _HISTOGRAMS if meta.get(name)), None)
    verified = meta.get("spec_verify_ct")
    if histogram is None and not verified:
        return None
    if histogram is not None:
        lengths = {accepted + 1: int(count) for accepted, count in enumerate(histogram) if count}
        rounds = sum(lengths.values())
        tokens = sum(length * count for length, count in lengths.items())
        at_least = [sum(histogram[slot:]) for slot in range(1, len(histogram))]
        return Rounds(
            num_rounds=rounds,
            num_tokens=tokens,
            lengths=lengths,
            num_accepted=tokens - rounds,
            num_proposed=_first_of(meta, "spec_num_proposed_drafts", "spec_draft_token_num"),
            proposed_per_slot=[rounds] * len(at_least),
            accepted_per_slot=at_least,
        )
    rounds = int(verified or 0)
    length = meta.get("spec_accept_length")
    if length is not None:
        tokens = round(float(length) * rounds)
    elif (total := meta.get("completion_tokens", completion_tokens)) is not None:
        tokens = int(total) - 1
    else:
        return None
    return Rounds(
        num_rounds=rounds,
        num_tokens=tokens,
        num_accepted=tokens - rounds,
        num_proposed=_first_of(meta, "spec_num_proposed_drafts", "spec_draft_token_num"),
    )


def _first_of(meta: Mapping[str, Any], *names: str) -> int | None:
    return next((int(meta[name]) for name in names if meta.get(name) is not None), None)
