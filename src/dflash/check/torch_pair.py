"""A loaded PyTorch engine as the probe's subject: its draft under both readings of the anchor and with shifted taps.

Variants share all weights with the engine: the other reading is a shallow copy of the network with another description,
the other taps are further columns of one recording.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.drafters.block import BlockDrafter
from dflash.backends.torch.drafters.eagle3 import Eagle3Drafter
from dflash.backends.torch.engine import TorchEngine
from dflash.backends.torch.target import TorchTarget, TorchTargetSession
from dflash.check.measures import FloatArray
from dflash.check.probe import CONFIGURED, EARLIER, LATER, OTHER_READING, Answer, Variant
from dflash.types import Drafting, SamplingParams


class TorchSubject:
    """Implements `dflash.check.probe.Subject`; `close` takes its hooks off the target."""

    def __init__(self, engine: TorchEngine, max_new_tokens: int) -> None:
        drafter = engine.drafter
        assert isinstance(drafter, BlockDrafter | Eagle3Drafter)
        self._engine = engine
        self._params = SamplingParams(max_new_tokens=max_new_tokens)
        taps = engine.target.taps
        shifted = {EARLIER: _shifted(taps, -1, 0), LATER: _shifted(taps, 1, engine.target.num_layers - 1)}
        shifted = {name: ids for name, ids in shifted.items() if ids != taps}
        self._union = sorted({*taps, *(tap for ids in shifted.values() for tap in ids)})
        self._recording = TorchTarget(engine.target.model, taps=self._union, exact_width=engine.target.exact_width)
        self._sessions: list[TorchTargetSession] = []
        own = self._columns(taps)
        self.variants = {CONFIGURED: Variant(drafter.session, own)}
        other = other_reading(drafter, engine.target) if isinstance(drafter, BlockDrafter) else None
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

    def recorder(self) -> TorchTargetSession:
        """A fresh session with the taps of all variants; the one before is freed."""
        for session in self._sessions:
            session.close()
        self._sessions = [self._recording.session()]
        return self._sessions[0]

    def probabilities(self, logits: Any) -> FloatArray:
        """Softmax at temperature 1, float32."""
        probs: FloatArray = logits.float().softmax(-1).cpu().numpy()
        return probs

    def close(self) -> None:
        """Free the recorder and take its hooks off."""
        for session in self._sessions:
            session.close()
        self._recording.close()

    def _columns(self, taps: Sequence[int]) -> list[int] | None:
        width = self._engine.target.hidden_size
        if list(taps) == self._union:
            return None
        starts = [self._union.index(tap) * width for tap in taps]
        return [start + column for start in starts for column in range(width)]


def other_reading(drafter: BlockDrafter, target: TorchTarget) -> BlockDrafter | None:
    """The same weights, read the other way: does slot 0 predict, or only hold the anchor? None if the block is too
    short for the other way."""
    config = drafter.network.config
    if config.anchor_predicts and config.block_size < 2:
        return None
    network: DraftModel = copy.copy(drafter.network)
    network.config = dataclasses.replace(config, anchor_predicts=not config.anchor_predicts)
    return type(drafter)(network, target)


def _shifted(taps: Sequence[int], by: int, limit: int) -> tuple[int, ...]:
    """Every tap moved by one layer, where there is such a layer and it is not taken."""
    moved = [tap if tap == limit else tap + by for tap in taps]
    return tuple(moved) if len(set(moved)) == len(moved) else tuple(taps)
