"""Recurrent state (gated delta rule, Mamba-2) and the windows of short convolutions.

A recurrent state cannot be cropped: it is a sum over all rows that were fed. So a forward works on a copy; if all its
rows are kept, the copy takes the place of the committed state, else it is thrown away and the kept rows are run again
from the committed state: by a second forward of the whole model (the slow reference) or of the recurrent layers alone
on their recorded inputs (replay.py). In exact mode rows are run one by one from the start, and the state after each is
kept. A layer that has convolution windows only keeps any prefix by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dflash.backends.torch.compat import LayerSpec, LinearAttentionCacheLayerMixin
from dflash.backends.torch.states.base import LayerState, Span


class RecurrentState(LayerState, LinearAttentionCacheLayerMixin):
    """Recurrent states [B, heads, ...] and convolution windows [B, channels, kernel], `spec.num_states` of each.

    What the model sees as `recurrent_states` and `conv_states` is the working copy of the running forward.
    """

    supports_trees = False
    rewinds = False
    is_sliding = False
    is_croppable = False
    is_compileable = False

    def __init__(self, span: Span, spec: LayerSpec) -> None:
        LayerState.__init__(self, span, spec)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=spec.num_states)
        self.record_past = True  # asks models to convolve through `update_conv_state` also for a single row
        self._forget()

    def _forget(self) -> None:
        self._recurrent: dict[int, torch.Tensor] = {}
        self._windows: dict[int, torch.Tensor] = {}
        self._fed: dict[int, torch.Tensor] = {}
        """Window and fed rows of each convolution, [B, channels, window + rows]."""
        self._num_fed = 0
        self._after_row: list[tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]] = []
        """Where rows were run one by one: states and windows after each."""
        self.recurrent_states: dict[int, torch.Tensor | None] = {}
        self.conv_states: dict[int, torch.Tensor | None] = {}
        self.has_previous_state = dict.fromkeys(range(self.spec.num_states), False)

    @property
    def keeps_prefixes(self) -> bool:  # type: ignore[override]  # depends on what the model stores
        """Convolution windows keep any prefix of the fed rows, and so does what was kept row by row."""
        return bool(self._after_row) or not any(state is not None for state in self.recurrent_states.values())

    def begin(self) -> None:
        self._after_row = []
        self.restart(self.span.num_rows)

    def restart(self, num_rows: int) -> None:
        """Work from the committed state on, for `num_rows` rows."""
        self._num_fed = num_rows
        self._fed = {}
        for index in range(self.spec.num_states):
            committed, window = self._recurrent.get(index), self._windows.get(index)
            # Some models update single rows in place.
            self.recurrent_states[index] = None if committed is None else committed.clone()
            self.conv_states[index] = None if window is None else window.clone()

    @contextmanager
    def rows_alone(self) -> Iterator[None]:
        """Inside, rows are run one after the other: `restart(1)`, the model's forward of the row, `keep_row`.
        Afterwards the committed state is what it was before."""
        recurrent, windows, self._after_row = self._recurrent, self._windows, []
        try:
            yield
        finally:
            self._recurrent, self._windows = recurrent, windows
            self._num_fed = self.span.num_rows

    def keep_row(self) -> None:
        """The next row continues behind the one that was just run."""
        self._recurrent, self._windows = dict(self._recurrent), dict(self._windows)
        for index in range(self.spec.num_states):
            self._keep(index, 1)
        self._after_row.append((self._recurrent, self._windows))

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to allocate: states are kept as the model makes them."""

    def update_conv_state(
        self,
        conv_states: torch.Tensor,  # [B, channels, rows]
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Take the inputs of a convolution; returns them behind its window, [B, channels, window + rows]."""
        window = self._windows.get(state_idx)
        self.conv_kernel_size[state_idx] = conv_kernel_size or conv_states.shape[-1]
        self._fed[state_idx] = conv_states if window is None else torch.cat([window, conv_states], dim=-1)
        return self._fed[state_idx]

    def update_recurrent_state(
        self,
        recurrent_states: torch.Tensor,  # [B, heads, ...]
        state_idx: int = 0,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Take the state after the last fed row."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def commit(self, path: Sequence[int]) -> None:
        num_kept = len(path)
        if num_kept and self._after_row:
            self._recurrent, self._windows = self._after_row[num_kept - 1]
        elif num_kept:
            assert num_kept == self._num_fed or self.keeps_prefixes, "kept rows must be run again"
            for index in range(self.spec.num_states):
                self._keep(index, num_kept)
        self._fed, self._after_row = {}, []

    def _keep(self, index: int, num_kept: int) -> None:
        state = self.recurrent_states.get(index)
        if state is not None:
            self._recurrent[index] = state
        fed = self._fed.get(index)
        if fed is None:  # a single row was convolved in place
            window = self.conv_states.get(index)
            if window is not None:
                self._windows[index] = window
        else:
            size = self.conv_kernel_size[index]
            assert size is not None
            fed = fed[..., : fed.shape[-1] - self._num_fed + num_kept]
            # Short texts: models that update windows in place need them at full size.
            self._windows[index] = torch.nn.functional.pad(fed[..., -size:], (max(0, size - fed.shape[-1]), 0)).clone()
        self.has_previous_state[index] = True

    def free(self) -> None:
        self._forget()

    def committed(self) -> list[torch.Tensor]:
        return [*self._recurrent.values(), *self._windows.values()]
