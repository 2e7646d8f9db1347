"""Does a draft belong to a target, and a width to a draft? What can be told before anything is decoded."""

from __future__ import annotations

from typing import NamedTuple

from dflash.core.draft_config import DraftConfig
from dflash.errors import ConfigError, PairError


class TargetShape(NamedTuple):
    """The sizes of a target that a draft depends on."""

    vocab_size: int
    hidden_size: int
    num_layers: int


def check_shapes(draft: DraftConfig, target: TargetShape, *, draft_name: str, target_name: str) -> None:
    """Raise PairError unless the draft was made for a target of this shape.

    A draft without an embedding or head of its own uses the target's, so widths and vocabularies must agree.
    """
    borrows = not (draft.owns_embedding and draft.owns_head)
    facts = (
        ("vocabulary size", draft.vocab_size, target.vocab_size),
        ("hidden size", draft.hidden_size if borrows else None, target.hidden_size),
        ("width of its taps", draft.tap_width if not borrows else draft.target_hidden_size, target.hidden_size),
        ("number of target layers", draft.num_target_layers, target.num_layers),
    )
    wrong = [f"{what} {theirs} (the target has {ours})" for what, theirs, ours in facts if theirs not in (None, ours)]
    if draft.target_layer_ids[-1] >= target.num_layers:
        wrong.append(f"tap {draft.target_layer_ids[-1]} (the target has layers 0 to {target.num_layers - 1})")
    if wrong:
        raise PairError(
            f"draft '{draft_name}' was made for another target than '{target_name}': {', '.join(wrong)}. "
            "Use the draft of this target, or train one with `dflash train`."
        )


def check_width(width: int | None, widest: int | None) -> None:
    """Raise ConfigError for a width (most rows of a verify forward) that is no width or would have no effect.

    `widest`: most rows that a round may feed; None = no draft is loaded.
    """
    if width is None:
        return
    if width < 1:
        raise ConfigError(f"width must be at least 1 (the anchor's row), not {width}.")
    if widest is None:
        raise ConfigError("width limits the rows of a round with drafts, but no draft is loaded; leave width out.")
    if width > widest:
        raise ConfigError(
            f"width {width} is more than the {widest} rows that a round feeds at most, so it would have no effect; "
            "lower it or leave it out."
        )
