"""Joined layers of a draft: what they hold. What they compute is tested with the network (test_draft_networks.py)."""

from __future__ import annotations

import dataclasses

from dflash.backends.torch.draft_model import DraftLayer
from tests.backends.test_draft_networks import BASE, network


def test_joined_layers_hold_their_weights_once() -> None:
    """Fault: a draft of gigabytes is held twice because its layers were joined; only context keys and values are."""
    draft = network(dataclasses.replace(BASE, attention_bias=True))
    draft.for_decoding()
    layer = next(iter(draft.layers))
    assert isinstance(layer, DraftLayer)
    for parts in (
        (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
        (layer.mlp.gate_proj, layer.mlp.up_proj),
    ):
        assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
