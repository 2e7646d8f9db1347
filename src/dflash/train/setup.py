"""From a recipe to everything a run needs: target, data, network, frozen head and feature source.

Knows how defaults are derived from the target (taps, mask id, shape) and how a new draft starts; the loop that uses it
all is `trainer.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash.backends.torch.compat import text_config
from dflash.backends.torch.draft_loading import load_draft
from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.loading import (
    LoadedTarget,
    check_pair,
    end_of_sequence_ids,
    fits_memory,
    open_target,
    set_threads,
)
from dflash.core.draft_config import DraftConfig
from dflash.errors import ConfigError, UnsupportedModel
from dflash.resolve import Progress, resolve_draft, resolve_target
from dflash.train import warm_start
from dflash.train.config import NetworkConfig, TrainConfig
from dflash.train.data import Dataset, load_dataset
from dflash.train.export import check_split
from dflash.train.features import (
    CachedFeatures,
    FeatureSource,
    OnlineFeatures,
    cache_gigabytes,
    weights_fingerprint,
)
from dflash.train.step import FrozenHead
from dflash.train.vocabulary import most_frequent

logger = logging.getLogger(__name__)

VOCABULARY_FILE = "draft_vocabulary.json"


@dataclass(frozen=True)
class Run:
    """What the trainer works on."""

    target: LoadedTarget
    data: Dataset
    network: DraftModel
    head: FrozenHead
    features: FeatureSource
    device: torch.device
    compute_dtype: torch.dtype

    def autocast(self) -> Any:
        """Context for forward passes: bfloat16 where the recipe or machine says so; weights stay float32."""
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)


def open_run(config: TrainConfig, progress: Progress | None = None) -> Run:
    """Load and build everything. Raises DFlashError subclasses with the cure for whatever does not fit."""
    set_threads(config.num_threads)
    target = open_target(config.target, dtype=config.dtype, device=config.device, progress=progress)
    target.model.requires_grad_(False)
    decoder_layers(target.model)
    data = load_dataset(
        config.data.answers,
        max_length=config.data.max_length,
        held_out=config.data.held_out,
        limit=config.data.limit,
        seed=config.data.split_seed,
        vocab_size=text_config(target.model).vocab_size,
    )
    network = _network(config, target, data)
    device = target.model.device
    check_pair(network.config, target.model, draft_name=config.init or "the new draft", target_name=config.target)
    head = frozen_head(target.model, network)
    recorded = recorded_layers(
        network.config.target_layer_ids,
        text_config(target.model).num_hidden_layers,
        distill=config.loss.distill > 0,
    )
    features = feature_source(config, target.model, recorded, data)
    with fits_memory("the draft", torch.float32, device):
        network = network.to(device).train()
    return Run(target, data, network, head, features, device, target.model.dtype)


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    """The decoder's layers; UnsupportedModel where they are not found by convention."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedModel(f"the decoder of {type(model).__name__} has no list `layers`; no draft can be trained.")
    return list(layers)


def frozen_head(model: Any, network: DraftModel) -> FrozenHead:
    """The target's embedding, norm and (possibly reduced) head in the form the training step uses."""
    weight: Tensor = model.get_output_embeddings().weight
    rows = torch.full((weight.shape[0],), -1, device=weight.device)
    if network.vocabulary is None:
        rows = torch.arange(weight.shape[0], device=weight.device)
    else:
        kept = torch.tensor(network.vocabulary, device=weight.device)
        rows[kept] = torch.arange(len(kept), device=weight.device)
        weight = weight[kept].contiguous()
    return FrozenHead(model.get_input_embeddings().weight, weight, final_norm(model), rows)


def final_norm(model: Any) -> nn.Module:
    """The norm between the decoder's last layer and the head; UnsupportedModel where it is not found by convention."""
    norm = getattr(model.get_decoder(), "norm", None)
    if not isinstance(norm, nn.Module):
        raise UnsupportedModel(f"the decoder of {type(model).__name__} has no module `norm`; no draft can be trained.")
    return norm


def recorded_layers(taps: Sequence[int], num_layers: int, *, distill: bool) -> tuple[int, ...]:
    """Layers whose outputs a run records: the draft's taps, and behind them the last layer where the loss asks for the
    target's own distribution. A draft need not tap it: engines differ in whether they norm that state."""
    last = num_layers - 1
    return (*taps, last) if distill and taps[-1] != last else tuple(taps)


def feature_source(config: TrainConfig, model: Any, taps: Sequence[int], data: Dataset) -> FeatureSource:
    """Online features, or the write-through cache in front of them (its final size is logged first)."""
    online = OnlineFeatures(model.get_decoder(), decoder_layers(model), taps)
    if config.data.features == "online":
        return online
    num_tokens = sum(len(s.token_ids) for s in (*data.train, *data.held_out))
    size = cache_gigabytes(num_tokens, len(taps), text_config(model).hidden_size)
    folder = config.data.features_folder or config.out / "features"
    logger.info("features will take %.1f GB in %s", size, folder)
    weights = weights_fingerprint(model.get_decoder())
    return CachedFeatures(online, folder, convention={"target": config.target, "weights": weights, "taps": list(taps)})


def default_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers spread evenly from layer 1 to the last but one: what engines hand on as the last layer's output is
    its state before the final norm in some and after it in others."""
    if count >= num_layers - 1:
        return tuple(range(max(1, num_layers - 1)))
    if count == 1:
        return (num_layers - 2,)
    return tuple(round(1 + i * (num_layers - 3) / (count - 1)) for i in range(count))


def default_mask_id(target: LoadedTarget, used: frozenset[int]) -> int:
    """The last special token that neither the answers nor the prompts nor the stop ids use."""
    special = sorted(int(i) for i in target.tokenizer.added_tokens_decoder)
    vocab_size: int = text_config(target.model).vocab_size
    free = [i for i in special if i < vocab_size and i not in used and i != target.tokenizer.pad_token_id]
    free = [i for i in free if i != target.tokenizer.eos_token_id]
    if not free:
        raise ConfigError("the tokenizer has no unused special token for mask slots; set network.mask_token_id.")
    return free[-1]


def _refuse_other_kinds(network: DraftModel, name: str) -> None:
    """Raise UnsupportedModel for drafts whose loss is not the one of this trainer."""
    draft = network.config
    if draft.kind != "dflash" or draft.anchor_predicts or draft.layer_attention or draft.owns_embedding:
        raise UnsupportedModel(
            f"draft '{name}' is no plain DFlash draft (kind {draft.kind}, or with windows, an anchor slot that "
            "predicts or its own embedding); this version trains plain ones only."
        )


def _network(config: TrainConfig, target: LoadedTarget, data: Dataset) -> DraftModel:
    if config.init is not None:
        source = resolve_draft(config.init, resolve_target(config.target))
        network = load_draft(source.path, torch.device("cpu"), torch.float32).requires_grad_(True)
        _refuse_other_kinds(network, config.init)
        _refuse_contradiction(config.network, network)
        check_split(source.path, config.data.split_seed)
        return network
    description, vocabulary = _describe(config.network, target, data)
    network = DraftModel(description)
    network.vocabulary = vocabulary
    generator = torch.Generator().manual_seed(config.seed)
    if config.network.start == "random":
        warm_start.random_start(network, generator)
        return network
    layers = decoder_layers(target.model)
    if config.network.start == "target" and description.num_hidden_layers > len(layers):
        raise ConfigError(
            f"network.num_layers {description.num_hidden_layers} is more than the target's {len(layers)}; lower it, or "
            "set network.start to random."
        )
    samples = data.train[:16]
    online = OnlineFeatures(target.model.get_decoder(), layers, description.target_layer_ids)
    features = [online.features(s.token_ids.tolist()).float().cpu() for s in samples]
    if config.network.start == "routed":
        embedding: Any = target.model.get_input_embeddings()
        norm_weight: Any = final_norm(target.model).weight
        warm_start.start_routed(
            network,
            features,
            embedding.weight.float().cpu(),
            torch.cat([torch.from_numpy(s.token_ids) for s in samples]),
            norm_weight.float().cpu(),
            generator,
        )
        return network
    inputs = warm_start.attention_inputs(target.model, layers[-description.num_hidden_layers :], samples[0].token_ids)
    skipped = warm_start.start_from_target(network, layers, final_norm(target.model), features[0], inputs, generator)
    if skipped:
        logger.warning("these draft tensors have no counterpart in the target and start at random: %s", skipped)
    return network


def _refuse_contradiction(asked: NetworkConfig, network: DraftModel) -> None:
    """Raise ConfigError for keys of `network` that the draft of `init` does not have: it cannot be reshaped."""
    has = vars(network.config) | {
        "num_layers": network.config.num_hidden_layers,
        "target_layer_ids": list(network.config.target_layer_ids),
        "draft_vocabulary_size": len(network.vocabulary or ()),
    }
    default = NetworkConfig()  # type: ignore[call-arg]
    wrong = [
        f"network.{name} {value} (it has {has[name]})"
        for name, value in asked
        if name in has and value != getattr(default, name) and value != has[name]
    ]
    if wrong:
        raise ConfigError(f"the draft of init cannot take another shape: {', '.join(wrong)}; leave these keys out.")


def _describe(
    network: NetworkConfig, target: LoadedTarget, data: Dataset
) -> tuple[DraftConfig, tuple[int, ...] | None]:
    """Shape of a new draft and its vocabulary."""
    base = text_config(target.model)
    heads: int = base.num_attention_heads
    head_dim: int = getattr(base, "head_dim", None) or base.hidden_size // heads
    rope = getattr(base, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(base, "rope_theta", None)
    if theta is None:
        raise UnsupportedModel("the target's configuration has no rope_theta; this version needs rotary targets.")
    taps = network.target_layer_ids or default_taps(base.num_hidden_layers, network.num_taps)
    ends = end_of_sequence_ids(target)
    used = ends.union(*(s.token_ids.tolist() for s in (*data.train, *data.held_out)))
    mask = network.mask_token_id if network.mask_token_id is not None else default_mask_id(target, used)
    if mask in used or not 0 <= mask < base.vocab_size:
        raise ConfigError(
            f"network.mask_token_id {mask} occurs in the data, ends answers or lies outside the vocabulary of "
            f"{base.vocab_size}; choose an unused token, or leave it out."
        )
    vocabulary = None
    if 0 < network.draft_vocabulary_size < base.vocab_size:
        answers = (s.token_ids[s.num_prompt :].tolist() for s in data.train)
        vocabulary = tuple(most_frequent(answers, network.draft_vocabulary_size, sorted(ends)))
    return (
        DraftConfig(
            hidden_size=base.hidden_size,
            num_hidden_layers=network.num_layers,
            num_attention_heads=network.num_attention_heads or heads,
            num_key_value_heads=network.num_key_value_heads or base.num_key_value_heads,
            head_dim=head_dim,
            intermediate_size=network.intermediate_size or base.intermediate_size,
            rms_norm_eps=base.rms_norm_eps,
            rope_theta=float(theta),
            vocab_size=base.vocab_size,
            block_size=network.block_size,
            mask_token_id=mask,
            target_layer_ids=tuple(taps),
            num_target_layers=base.num_hidden_layers,
            draft_vocabulary_file=VOCABULARY_FILE if vocabulary else None,
        ),
        vocabulary,
    )
