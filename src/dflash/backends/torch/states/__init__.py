"""Kinds of layer state, one per file, and the table of them; see `base` for the contract.

The table's keys are Transformers' own classes of a layer's state, never names of models. What is not listed cannot be
decoded losslessly by this version and is refused at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dflash.backends.torch.states.base import LayerState
from dflash.backends.torch.states.full import FullKeyValueState
from dflash.backends.torch.states.hybrid import RecurrentAndFullState, RecurrentAndSlidingState
from dflash.backends.torch.states.indexed import BlockIndexedState, IndexedState
from dflash.backends.torch.states.none import NoState
from dflash.backends.torch.states.recurrent import RecurrentState
from dflash.backends.torch.states.sliding import SlidingKeyValueState

KINDS: Mapping[str, type[LayerState]] = MappingProxyType(
    {
        "DynamicLayer": FullKeyValueState,
        "DynamicSlidingWindowLayer": SlidingKeyValueState,
        "DynamicIndexedLayer": IndexedState,
        "MiniMaxM3VLSparseCacheLayer": BlockIndexedState,
        "LinearAttentionLayer": RecurrentState,
        "LinearAttentionAndFullAttentionLayer": RecurrentAndFullState,
        "LinearAttentionAndSlidingWindowAttentionLayer": RecurrentAndSlidingState,
        "DummyLayer": NoState,
    }
)
