"""A loaded engine as the probe's subject: its draft under both readings of the anchor and with shifted taps.

Variants share all weights with the engine: the other reading is a shallow copy of the network with another description,
the other taps are further columns of one recording. Knows engines (`core/engine.py`) and what all drafters of blocks
have, no tensor library.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dflash.check.probe import CONFIGURED, EARLIER, LATER, OTHER_READING, Answer, Variant
from dflash.core.draft_config import DraftConfig
from dflash.core.eagle3_config import Eagle3Config
from dflash.core.engine import Engine, TargetSession
from dflash.core.protocols import Drafter
from dflash.core.reference import FloatArray
from dflash.errors import ConfigError
from dflash.types import Drafting, SamplingParams


class _Network(Protocol):
    config: DraftConfig


class BlockDrafter(Protocol):
    """A drafter of blocks, of any backend: made from a network and a target."""

    network: _Network

    def session(self) -> Drafter:
        """A fresh session."""
        ...


class PairSubject:
    """Implements `dflash.check.probe.Subject`; `close` takes off what it put on the target."""

    def __init__(self, engine: Engine, max_new_tokens: int) -> None:
        """Raises ConfigError if the engine's drafter has no network over taps."""
        drafter: Any = engine.drafter
        if not hasattr(drafter, "network"):
            raise ConfigError("only drafts that read the target's layers can be checked; name one of these.")
        self._engine = engine
        self._params = SamplingParams(max_new_tokens=max_new_tokens)
        target = engine.target
        taps = tuple(target.taps)
        shifted = {EARLIER: _shifted(taps, -1, 0), LATER: _shifted(taps, 1, target.num_layers - 1)}
        shifted = {name: ids for name, ids in shifted.items() if ids != taps}
        self._union = sorted({*taps, *(tap for ids in shifted.values() for tap in ids)})
        self._recording = target.with_taps(self._union)
        self._sessions: list[TargetSession] = []
        own = self._columns(taps)
        self.variants = {CONFIGURED: Variant(drafter.session, own)}
        other = other_reading(drafter, target)
        if other is not None:
            self.variants[OTHER_READING] = Variant(other.session, own)
        for name, ids in shifted.items():
            self.variants[name] = Variant(drafter.session, self._columns(ids))

    def answer(self, prompt_ids: Sequence[int]) -> Answer:
        """Greedily through the real loop, whole blocks every round: what the draft can do is what is looked at."""
        whole_blocks = Drafting(fixed=True)
        events = list(self._engine.stream(prompt_ids=prompt_ids, params=self._params, drafting=whole_blocks))
        tokens = [token for event in events for token in event.token_ids]
        return Answer(prompt_ids, tokens, [event.round for event in events])

    def recorder(self) -> TargetSession:
        """A fresh session with the taps of all variants; the one before is freed."""
        for session in self._sessions:
            session.close()
        self._sessions = [self._recording.session()]
        return self._sessions[0]

    def probabilities(self, logits: Any) -> FloatArray:
        """Softmax at temperature 1, float32."""
        rows = self._engine.as_numpy(logits)
        weights = np.exp(rows - rows.max(axis=-1, keepdims=True))
        probs: FloatArray = weights / weights.sum(axis=-1, keepdims=True)
        return probs

    def close(self) -> None:
        """Free the recorder and take what it put on the target off."""
        for session in self._sessions:
            session.close()
        self._recording.close()

    def _columns(self, taps: Sequence[int]) -> list[int] | None:
        width = self._engine.target.hidden_size
        if list(taps) == self._union:
            return None
        starts = [self._union.index(tap) * width for tap in taps]
        return [start + column for start in starts for column in range(width)]


def other_reading(drafter: Any, target: Any) -> BlockDrafter | None:
    """The same weights, read the other way: does slot 0 predict, or only hold the anchor? None if the block is too
    short for the other way, or there is none."""
    config: DraftConfig = drafter.network.config
    if isinstance(config, Eagle3Config):
        return None  # no block, no slots
    if config.anchor_predicts and config.block_size < 2:
        return None
    network = copy.copy(drafter.network)
    network.config = dataclasses.replace(config, anchor_predicts=not config.anchor_predicts)
    made: BlockDrafter = type(drafter)(network, target)
    return made


def _shifted(taps: Sequence[int], by: int, limit: int) -> tuple[int, ...]:
    """Every tap moved by one layer, where there is such a layer and it is not taken."""
    moved = [tap if tap == limit else tap + by for tap in taps]
    return tuple(moved) if len(set(moved)) == len(moved) else tuple(taps)
