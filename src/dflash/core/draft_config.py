"""The resolved description of a draft network: every dialect of checkpoint ends in this one form.

Knows what the numbers mean and which of them contradict one another; does not know how any file spells them
(`core/dialects/`) nor which tensors they ask for (`core/draft_tensors.py`). Nothing that changes the mathematics has a
default that a reader could fall back to: where a field has one here, it means "this network does not have that".
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dflash.errors import CheckpointError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
ARCHITECTURE = "DFlashDraftModel"
MARKOV_HEADS = ("vanilla", "gated", "rnn")
MAX_BLOCK_SIZE = 1024
"""No draft comes near it; a file that says more is damaged or hostile, and the block is allocated from this number."""


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """What the block rows of one draft layer may see."""

    window: int | None = None
    """W: the row at position p sees context rows with p - t < W (itself counted); None = all of them."""
    causal: bool = False
    """Whether slot i sees only slots <= i of its block; False = the whole block."""
    sinks: bool = False
    """Whether each head has a learned logit that takes part in the softmax and carries no value."""


FULL_ATTENTION = LayerAttention()


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Rotary frequencies stretched to a longer context (arXiv:2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    """Multiplies cos and sin, at every position."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """A DFlash (arXiv:2602.06036), DFlash 2 or DSpark (arXiv:2607.05147) draft network."""

    hidden_size: int
    """H: width of the draft; also of the target's embedding and head, where the draft borrows them."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    """V of the target."""
    block_size: int
    """B: slots per block, anchor slot included; a block proposes B - 1 tokens, or B if the anchor slot predicts."""
    mask_token_id: int
    """Id whose embedding fills the mask slots; never proposed."""
    target_layer_ids: tuple[int, ...]
    """Taps: z means the output of decoder layer z (Transformers' hidden_states[z + 1])."""
    num_target_layers: int | None = None
    """Layer count of the target, where the file states it (checked against the target)."""
    target_hidden_size: int | None = None
    """Width of each tap where it is not `hidden_size`."""
    draft_vocabulary_file: str | None = None
    """Our extension: JSON list of target ids; the draft scores only these rows of the target's head. Other
    engines ignore it and use the full head with the same weights."""

    anchor_predicts: bool = False
    """False: slot i >= 1 predicts position n + i. True: slot i >= 0 predicts position n + i + 1."""
    layer_attention: tuple[LayerAttention, ...] = ()
    """One per layer; () = every layer sees all context rows and its whole block."""
    window_from_anchor: bool = False
    """True: all slots of a block see the same context rows, t >= anchor - W (Speculators); one row more than slot 0
    sees otherwise."""
    attention_bias: bool = False
    """Whether q, k, v and o projections have biases."""
    sliding_rope_theta: float | None = None
    """Theta of the layers with a window, where it is another one."""
    yarn: Yarn | None = None
    rope_interleaved: bool = False
    """Rotary pairs are neighbours (2d, 2d + 1) instead of (d, d + D/2)."""
    input_embedding_scale: float = 1.0
    """Factor on the raw embedding rows that enter the block."""
    output_multiplier: float = 1.0
    """Factor on the logits, before the cap."""
    final_logit_softcapping: float | None = None
    """c: logits become c * tanh(logits / c)."""

    owns_embedding: bool = False
    """Whether the checkpoint has its own embedding [V, H]; else the target's is used."""
    owns_head: bool = False
    """Whether the checkpoint has its own head [V_draft, H]; else the target's is used."""
    draft_vocab_size: int | None = None
    """V_draft of an own head that scores a part of the vocabulary; None = all of it."""

    conv_kernel_size: int = 0
    """DFlash 2: taps of the dynamic convolution around each sublayer; 0 = none."""
    conv_group_size: int = 0
    """DFlash 2: channels that share a dynamic kernel."""
    selector_rank: int = 0
    """DFlash 2: width of the candidate selector's codes; 0 = no selector."""
    selector_top_k: int = 0
    """DFlash 2: candidates per slot."""
    markov_rank: int = 0
    """DSpark: width of the Markov head; 0 = none."""
    markov_head: str = ""
    """DSpark: "vanilla", "gated" or "rnn"."""
    confidence_head: bool = False
    """DSpark: whether a head predicts the acceptance of each slot."""
    confidence_with_markov: bool = False
    """DSpark: whether that head reads the predecessor's Markov code too."""

    def __post_init__(self) -> None:
        write_once(self)
        check_attention_sizes(self)
        _check_block(self)
        check_taps(self)
        _check_attention(self)
        _check_heads(self)
        check_vocabulary(self)

    @property
    def kind(self) -> str:
        """Name of the drafter that runs it: "dflash", "dflash2" or "dspark"."""
        if self.markov_rank or self.confidence_head:
            return "dspark"
        return "dflash2" if self.conv_kernel_size or self.selector_rank else "dflash"

    @property
    def has_transitions(self) -> bool:
        """Whether the draft says itself how likely each candidate is after each one of the slot before."""
        return bool(self.selector_rank or self.markov_rank)

    @property
    def tap_width(self) -> int:
        """Width of one tap: the target's hidden size."""
        return self.target_hidden_size or self.hidden_size

    @property
    def fc_in_features(self) -> int:
        """Width of the concatenated taps of one token."""
        return len(self.target_layer_ids) * self.tap_width

    @property
    def max_proposal(self) -> int:
        """Most tokens one block proposes."""
        return self.block_size if self.anchor_predicts else self.block_size - 1

    def attention_of(self, layer: int) -> LayerAttention:
        """What layer `layer` may see."""
        return self.layer_attention[layer] if self.layer_attention else FULL_ATTENTION

    def rope_theta_of(self, layer: int) -> float:
        """Rotary base of layer `layer`."""
        slides = self.attention_of(layer).window is not None
        return self.sliding_rope_theta if slides and self.sliding_rope_theta is not None else self.rope_theta

    def for_target(self, num_layers: int) -> DraftConfig:
        """The description for a target of so many layers; another one only where taps depend on its depth."""
        return self

    def to_json(self) -> dict[str, Any]:
        """The config.json of this draft in the z-lab layout (DFlash and DFlash 2; readable by other engines)."""
        from dflash.core.dialects.zlab import write_config

        return write_config(self)


def write_once(config: DraftConfig) -> None:
    """Give the plain case one spelling, so that equal networks have equal descriptions."""
    if all(layer == FULL_ATTENTION for layer in config.layer_attention):
        object.__setattr__(config, "layer_attention", ())
    if config.target_hidden_size == config.hidden_size:
        object.__setattr__(config, "target_hidden_size", None)
    if config.draft_vocab_size == config.vocab_size:
        object.__setattr__(config, "draft_vocab_size", None)
    if config.sliding_rope_theta == config.rope_theta:
        object.__setattr__(config, "sliding_rope_theta", None)


def check_attention_sizes(config: DraftConfig) -> None:
    """Raise CheckpointError for sizes and factors that no layer can have."""
    names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += ["intermediate_size", "vocab_size", "rms_norm_eps", "rope_theta", "input_embedding_scale"]
    names += ["output_multiplier"]
    optional = ("target_hidden_size", "draft_vocab_size", "sliding_rope_theta", "final_logit_softcapping")
    names += [name for name in optional if getattr(config, name) is not None]
    for name in names:
        value: float = getattr(config, name)
        if not 0 < value < float("inf"):
            raise CheckpointError(f"{name} must be positive, not {value}; correct the draft's config.json.")
    if config.head_dim % 2:
        raise CheckpointError(f"head_dim is {config.head_dim}: rotary embedding turns pairs, so it must be even.")
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError(
            f"num_attention_heads {config.num_attention_heads} must be a multiple of num_key_value_heads "
            f"{config.num_key_value_heads}; correct the draft's config.json."
        )


def _check_block(config: DraftConfig) -> None:
    least = 1 if config.anchor_predicts else 2
    if not least <= config.block_size <= MAX_BLOCK_SIZE:
        raise CheckpointError(
            f"block_size is {config.block_size}: a block needs the anchor and at least one draft slot (>= {least}), "
            f"and at most {MAX_BLOCK_SIZE}. Correct it in the draft's config.json."
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise CheckpointError(
            f"mask_token_id {config.mask_token_id} lies outside the vocabulary of {config.vocab_size} tokens."
        )


def check_taps(config: DraftConfig) -> None:
    """Raise CheckpointError unless the taps are increasing layers that the target has."""
    ids = config.target_layer_ids
    if not ids:
        raise CheckpointError("target_layer_ids is empty; write the tapped layers the draft was trained with.")
    if any(layer < 0 for layer in ids) or any(b <= a for a, b in pairwise(ids)):
        raise CheckpointError(
            f"target_layer_ids must be increasing layer numbers from 0, not {list(ids)}; the order is baked "
            "into fc, so it has to be the one used in training."
        )
    if config.num_target_layers is not None and ids[-1] >= config.num_target_layers:
        raise CheckpointError(f"tap {ids[-1]} does not exist in a target of {config.num_target_layers} layers.")


def _check_attention(config: DraftConfig) -> None:
    layers = config.layer_attention
    if layers and len(layers) != config.num_hidden_layers:
        raise CheckpointError(
            f"the draft describes the attention of {len(layers)} layers, but has {config.num_hidden_layers}; correct "
            "layer_types or num_hidden_layers in its config.json."
        )
    for layer in layers:
        if layer.window is not None and layer.window < config.block_size:
            raise CheckpointError(
                f"a window of {layer.window} tokens is smaller than the block of {config.block_size}; correct "
                "sliding_window in the draft's config.json."
            )


def _check_heads(config: DraftConfig) -> None:
    if bool(config.conv_kernel_size) != bool(config.conv_group_size):
        raise CheckpointError("conv_kernel_size and conv_group_size belong together; the draft has only one of them.")
    if bool(config.selector_rank) != bool(config.selector_top_k):
        raise CheckpointError("selector_rank and selector_top_k belong together; the draft has only one of them.")
    if config.conv_kernel_size < 0 or (config.conv_group_size and config.hidden_size % config.conv_group_size):
        raise CheckpointError(
            f"conv_group_size {config.conv_group_size} must divide hidden_size {config.hidden_size} and "
            "conv_kernel_size must not be negative."
        )
    if not 0 <= config.selector_top_k <= (config.draft_vocab_size or config.vocab_size) or config.selector_rank < 0:
        raise CheckpointError(f"selector_top_k is {config.selector_top_k}; it must lie within the vocabulary.")
    if config.markov_rank < 0 or (config.markov_rank and config.markov_head not in MARKOV_HEADS):
        raise CheckpointError(
            f"markov_rank {config.markov_rank} with head type '{config.markov_head}' is unknown; use one of "
            f"{', '.join(MARKOV_HEADS)}."
        )
    if config.confidence_with_markov and not (config.markov_rank and config.confidence_head):
        raise CheckpointError("confidence_head_with_markov needs a Markov head and a confidence head.")
    if (config.conv_kernel_size or config.selector_rank) and (config.markov_rank or config.confidence_head):
        raise CheckpointError("a draft with both DFlash 2's and DSpark's heads is no kind that is known.")


def check_vocabulary(config: DraftConfig) -> None:
    """Raise CheckpointError for a reduced vocabulary without a head of that size."""
    if config.draft_vocab_size is not None and not (config.owns_head and config.draft_vocab_size < config.vocab_size):
        raise CheckpointError(
            f"draft_vocab_size {config.draft_vocab_size} needs a head of that size in the checkpoint, and must be "
            f"smaller than the vocabulary of {config.vocab_size}."
        )
