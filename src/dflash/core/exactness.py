"""What a probe for bit-exact decoding finds (docs/exactness.md); the probing itself is a backend's business."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WidthClass:
    """What the probe found."""

    holds: bool
    """Bit-exact decoding is possible here: all tried widths from `width` on agree."""
    width: int
    """Least number of rows of every decoding forward; 1 where `holds` is false."""
    widths_tried: tuple[int, ...]
    """Forward widths whose rows were compared with those of the widest, ascending."""
    reason: str
    """One sentence for people: what holds, or what differed first."""
