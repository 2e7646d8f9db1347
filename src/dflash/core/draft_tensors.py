"""Which tensors a described draft consists of, with their shapes: the strict check of a checkpoint, both ways.

Names are those of z-lab's v1 checkpoints, and DeepSpec's for DSpark's heads. Pure arithmetic, so that a folder is
judged before anything is loaded; the backends' networks are tested against this list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dflash.core.draft_config import DraftConfig
from dflash.core.eagle3_config import Eagle3Config
from dflash.core.safetensors_files import FLOATING, StoredTensor
from dflash.errors import CheckpointError

Shape = tuple[int, ...]


def expected_tensors(config: DraftConfig) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every tensor, one by one (a hostile config may ask for any number of layers)."""
    hidden = config.hidden_size
    yield "fc.weight", (hidden, config.fc_in_features)
    if isinstance(config, Eagle3Config):
        yield from _eagle3(config)
        return
    yield "hidden_norm.weight", (hidden,)
    yield "norm.weight", (hidden,)
    for number in range(config.num_hidden_layers):
        for name, shape in _layer(config, number):
            yield f"layers.{number}.{name}", shape
    yield from _vocabulary(config)
    yield from _heads(config)


def _eagle3(config: Eagle3Config) -> Iterator[tuple[str, Shape]]:
    """The first layer reads an embedding and a hidden state side by side; further ones are ordinary."""
    hidden = config.hidden_size
    yield "norm.weight", (hidden,)
    if config.fused_norm == "whole":
        yield "input_norm.weight", (config.fc_in_features,)
    if config.fused_norm == "each":
        for tap in range(config.fc_in_features // config.tap_width):
            yield f"fc_norm.{tap}.weight", (config.tap_width,)
    for number in range(config.num_hidden_layers):
        if number == 0:
            yield "layers.0.hidden_norm.weight", (hidden,)
        attention = _attention(config, inputs=hidden if number else 2 * hidden, head_norms=config.head_norms)
        for name, shape in (*attention, *_rest_of_layer(config)):
            yield f"layers.{number}.{name}", shape
    yield from _vocabulary(config)


def _attention(config: DraftConfig, *, inputs: int, head_norms: bool) -> Iterator[tuple[str, Shape]]:
    width = config.head_dim
    outputs = {
        "q_proj": (config.num_attention_heads * width, inputs),
        "k_proj": (config.num_key_value_heads * width, inputs),
        "v_proj": (config.num_key_value_heads * width, inputs),
        "o_proj": (config.hidden_size, config.num_attention_heads * width),
    }
    for name, shape in outputs.items():
        yield f"self_attn.{name}.weight", shape
        if config.attention_bias:
            yield f"self_attn.{name}.bias", shape[:1]
    if head_norms:
        yield "self_attn.q_norm.weight", (width,)
        yield "self_attn.k_norm.weight", (width,)


def _rest_of_layer(config: DraftConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield "mlp.gate_proj.weight", (inner, hidden)
    yield "mlp.up_proj.weight", (inner, hidden)
    yield "mlp.down_proj.weight", (hidden, inner)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def _layer(config: DraftConfig, number: int) -> Iterator[tuple[str, Shape]]:
    hidden = config.hidden_size
    yield from _attention(config, inputs=hidden, head_norms=True)
    if config.attention_of(number).sinks:
        yield "self_attn.attention_sink_bias", (config.num_attention_heads,)
    yield from _rest_of_layer(config)
    if config.conv_kernel_size:
        for name in ("attention_conv", "mlp_conv"):
            yield f"{name}.base_kernel", (2, config.conv_kernel_size, hidden)
            groups = hidden // config.conv_group_size
            yield f"{name}.kernel_projection.weight", (2 * config.conv_kernel_size * groups, hidden)


def _vocabulary(config: DraftConfig) -> Iterator[tuple[str, Shape]]:
    if config.owns_embedding:
        yield "embed_tokens.weight", (config.vocab_size, config.hidden_size)
    if config.owns_head:
        yield "lm_head.weight", (config.draft_vocab_size or config.vocab_size, config.hidden_size)


def _heads(config: DraftConfig) -> Iterator[tuple[str, Shape]]:
    hidden, rank = config.hidden_size, config.markov_rank
    if config.selector_rank:
        yield "candidate_selector.predecessor_codebook", (config.vocab_size, config.selector_rank)
        yield "candidate_selector.successor_codebook", (config.vocab_size, config.selector_rank)
        yield "candidate_selector.hidden_projection.weight", (config.selector_rank, hidden)
    if rank:
        yield "markov_head.markov_w1.weight", (config.vocab_size, rank)
        yield "markov_head.markov_w2.weight", (config.draft_vocab_size or config.vocab_size, rank)
        if config.markov_head == "gated":
            yield "markov_head.gate_proj.weight", (rank, hidden + rank)
            yield "markov_head.gate_proj.bias", (rank,)
        if config.markov_head == "rnn":
            yield "markov_head.joint_proj.weight", (3 * rank, 2 * rank + hidden)
            yield "markov_head.joint_proj.bias", (3 * rank,)
    if config.confidence_head:
        yield "confidence_head.proj.weight", (1, hidden + (rank if config.confidence_with_markov else 0))
        yield "confidence_head.proj.bias", (1,)


def check_tensors(config: DraftConfig, stored: Mapping[str, StoredTensor], *, source: str) -> None:
    """Raise CheckpointError unless `stored` (by this project's names) are exactly the draft's tensors, in shape and in
    a floating-point type. A draft with a hole would still give correct text, only slowly."""
    fused = stored.get("fc.weight")
    if fused is not None and len(fused.shape) == 2 and fused.shape[1] != config.fc_in_features:
        taps = config.fc_in_features // config.tap_width
        raise CheckpointError(
            f"{source}: fc reads {fused.shape[1]} features, but {taps} taps of width {config.tap_width} give "
            f"{config.fc_in_features}; target_layer_ids in config.json is not the list of the training."
        )
    missing: list[str] = []
    known: set[str] = set()
    for name, shape in expected_tensors(config):
        tensor = stored.get(name)
        if tensor is None:
            missing.append(name)
            if len(missing) > len(stored):
                break  # no need to count the layers that a damaged config asks for
            continue
        known.add(name)
        if tensor.shape != shape:
            raise CheckpointError(f"{source}: {name} has shape {list(tensor.shape)}, not {list(shape)}.")
        if tensor.dtype not in FLOATING:
            raise CheckpointError(
                f"{source}: {name} holds {tensor.dtype}, not floating-point weights; quantised drafts do not run here, "
                "export it again in bfloat16, float16 or float32."
            )
    unexpected = sorted(stored.keys() - known)
    if missing or unexpected:
        parts = [f"lacks {missing[0]} (of {len(missing)})"] if missing else []
        parts += [f"has {unexpected[0]} (of {len(unexpected)}), which is not part of it"] if unexpected else []
        raise CheckpointError(
            f"{source} {' and '.join(parts)}; config.json and weights do not belong together, download or export the "
            "draft again."
        )
