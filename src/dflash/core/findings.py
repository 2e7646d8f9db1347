"""What a check found: how bad it is, what it is about, and a sentence that names the cure. Plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
"""error: must not be used like this; warning: works, but may be slow or not what was meant; note: worth knowing."""


@dataclass(frozen=True)
class Finding:
    """One thing that a check has to say."""

    severity: Severity
    subject: str
    """What it is about, in a word or two: "taps", "mask id", "anchor"."""
    message: str


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether one of them is an error."""
    return any(finding.severity == "error" for finding in findings)
