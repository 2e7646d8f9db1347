"""The resolved description of a pair, in rows that a person can read and a program can keep.

Everything that decides how a draft is run is shown, also where it is the plain case: an unread key is only noticed if
its effect is printed. Knows the meaning of the fields of `DraftConfig`, no files and no models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dflash.core.draft_config import DraftConfig
from dflash.core.eagle3_config import Eagle3Config


@dataclass(frozen=True)
class Row:
    """One line of the description."""

    name: str
    value: str
    origin: str = ""
    """Where the draft's files say it; empty where it was measured or follows from the shapes."""


@dataclass(frozen=True, kw_only=True)
class PairFacts:
    """What is known besides the draft's description."""

    target: str
    target_revision: str | None
    target_class: str
    target_states: Sequence[str]
    """Kind of each layer's state."""
    target_vocabulary: int
    target_hidden: int
    template_sha256: str | None
    """Of the tokenizer's chat template; None without one."""
    draft: str
    draft_revision: str | None
    draft_sha256: str | None
    dialect: str
    origins: Mapping[str, str]
    mask_token: str
    """The mask id as text."""
    num_scored: int
    """Target ids that the draft can propose."""
    num_bigrams: int = 0
    """Pairs of tokens counted beside the draft."""
    trained_for: str | None = None
    """Thinking mode or template, where something says so."""


def describe(config: DraftConfig, facts: PairFacts) -> list[Row]:
    """All rows, target first."""
    how = _eagle3_rows(config) if isinstance(config, Eagle3Config) else (*_attention_rows(config), *_scale_rows(config))
    rows = [*_target_rows(facts), *_draft_rows(config, facts), *how]
    keys = {
        "taps": "target_layer_ids",
        "block": "block_size",
        "chain": "block_size",
        "mask id": "mask_token_id",
        "rope": "rope_theta",
        "anchor": "sample_from_anchor",
    }
    return [Row(row.name, row.value, facts.origins.get(keys.get(row.name, ""), row.origin)) for row in rows]


def _target_rows(facts: PairFacts) -> Iterator[Row]:
    yield Row("target", f"{facts.target} ({facts.target_class})")
    yield Row("target revision", facts.target_revision or "not from a hub")
    kinds = ", ".join(f"{count} {name}" for name, count in Counter(facts.target_states).items())
    yield Row("target layers", f"{len(facts.target_states)}, states: {kinds}")
    template = "no chat template" if facts.template_sha256 is None else f"sha256 {facts.template_sha256[:16]}"
    yield Row("chat template", template)


def _draft_rows(config: DraftConfig, facts: PairFacts) -> Iterator[Row]:
    yield Row("draft", f"{facts.draft} ({config.kind}, {config.num_hidden_layers} layers)")
    yield Row("draft layout", facts.dialect)
    yield Row("draft revision", facts.draft_revision or "not from a hub")
    yield Row("draft sha256", facts.draft_sha256 or "-")
    yield Row("trained for", facts.trained_for or "not stated (thinking mode, chat template)")
    taps = config.target_layer_ids
    yield Row("taps", f"{_listed(taps)}: outputs of these decoder layers, counted from 0")
    yield Row("taps elsewhere", f"{_listed([tap + 1 for tap in taps])} where layers are named by what enters them")
    if isinstance(config, Eagle3Config):
        yield Row("chain", f"at most {config.max_proposal} draft tokens, one step of the draft each")
    else:
        yield from _block_rows(config, facts)
    scored = facts.num_scored
    part = "all" if scored >= facts.target_vocabulary - 1 else f"{scored / facts.target_vocabulary:.0%}"
    yield Row("vocabulary", f"{scored} of {facts.target_vocabulary} tokens can be proposed ({part})")
    counted = f"{facts.num_bigrams} pairs of neighbours counted" if facts.num_bigrams else "none counted"
    yield Row("bigrams", "not needed, the draft has transitions of its own" if config.has_transitions else counted)
    yield Row("embedding", "the draft's own" if config.owns_embedding else "the target's")
    yield Row("head", "the draft's own" if config.owns_head else "the target's")


def _block_rows(config: DraftConfig, facts: PairFacts) -> Iterator[Row]:
    yield Row("block", f"{config.block_size} slots, at most {config.max_proposal} draft tokens")
    anchor = "slot 0 predicts, slot i the token at n + i + 1" if config.anchor_predicts else "slot 0 holds the anchor, "
    yield Row("anchor", anchor if config.anchor_predicts else f"{anchor}slot i predicts the token at n + i")
    yield Row("mask id", f"{config.mask_token_id} {facts.mask_token!r}")


def _eagle3_rows(config: Eagle3Config) -> Iterator[Row]:
    norms = {"": "no norm", "whole": "one norm over all taps", "each": "a norm on each tap"}
    yield Row("fusion", f"{norms[config.fused_norm]} before fc ({config.fc_in_features} to {config.hidden_size})")
    yield Row("residual", "the normed hidden state" if config.norm_before_residual else "the hidden state as it is")
    fed = "its normed output, which the head reads" if config.feeds_normed else "its output before the norm"
    yield Row("fed back", f"{fed}; true features after each verification")
    if config.head_norms:
        yield Row("head norms", "queries and keys are normed per head")
    scaling = f", linear factor {config.rope_factor:g}" if config.rope_factor != 1 else ""
    scaling += f", Llama 3.1's scaling by {config.llama3.factor:g}" if config.llama3 is not None else ""
    scaling += f", YaRN factor {config.yarn.factor:g}" if config.yarn is not None else ""
    pairs = ", neighbouring pairs" if config.rope_interleaved else ""
    yield Row("rope", f"theta {config.rope_theta:g}{scaling}{pairs}")


def _attention_rows(config: DraftConfig) -> Iterator[Row]:
    layers = [config.attention_of(layer) for layer in range(config.num_hidden_layers)]
    yield Row("in the block", _by_layer(["causal" if one.causal else "sees the whole block" for one in layers]))
    windows = ["all of the context" if one.window is None else f"{one.window} tokens" for one in layers]
    rule = " (counted from the anchor)" if config.window_from_anchor else ""
    yield Row("window", _by_layer(windows) + rule)
    if any(one.sinks for one in layers):
        yield Row("attention sinks", _by_layer(["yes" if one.sinks else "no" for one in layers]))
    rope = _by_layer([f"theta {config.rope_theta_of(layer):g}" for layer in range(len(layers))])
    if config.yarn is not None:
        rope += f", YaRN factor {config.yarn.factor:g}"
    if config.rope_interleaved:
        rope += ", neighbouring pairs"
    yield Row("rope", rope)


def _scale_rows(config: DraftConfig) -> Iterator[Row]:
    cap = config.final_logit_softcapping
    yield Row(
        "scales",
        f"embedding x {config.input_embedding_scale:g}, logits x {config.output_multiplier:g}, "
        + ("no cap" if cap is None else f"capped at {cap:g}"),
    )
    if config.conv_kernel_size or config.selector_rank:
        yield Row(
            "DFlash 2",
            f"convolution over {config.conv_kernel_size} in groups of {config.conv_group_size}, selector of rank "
            f"{config.selector_rank} over {config.selector_top_k} candidates",
        )
    if config.markov_rank or config.confidence_head:
        head = (
            f"{config.markov_head} Markov head of rank {config.markov_rank}" if config.markov_rank else "no Markov head"
        )
        yield Row("DSpark", f"{head}, {'a' if config.confidence_head else 'no'} confidence head")


def _by_layer(values: Sequence[str]) -> str:
    """'x' if all layers agree, else 'layers 0-3: x; layer 4: y'."""
    if len(set(values)) == 1:
        return values[0]
    parts = []
    start = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[start]:
            name = f"layer {start}" if index == start + 1 else f"layers {start}-{index - 1}"
            parts.append(f"{name}: {values[start]}")
            start = index
    return "; ".join(parts)


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))
