"""Does a draft belong to a target, a width to a draft, a prompt into a context? What can be told before anything is
decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dflash.core.draft_config import DraftConfig
from dflash.errors import ConfigError, PairError, PromptError


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


def check_taps(taps: Sequence[int], num_layers: int, model_name: str) -> None:
    """Raise PairError for a tap that is no layer of the model."""
    for tap in taps:
        if not 0 <= tap < num_layers:
            raise PairError(
                f"the draft reads layer {tap} of its target, but {model_name} has layers 0..{num_layers - 1}: use the "
                "target that the draft was trained for."
            )


def check_prompt(num_new: int, num_committed: int, max_length: int) -> None:
    """Raise PromptError unless `num_new` tokens can be fed behind `num_committed` within the context."""
    if not num_new:
        raise PromptError("the prompt is empty: give at least one token.")
    total = num_committed + num_new
    if total > max_length:
        raise PromptError(f"the prompt has {total} tokens, but the target's context holds {max_length}: shorten it.")
