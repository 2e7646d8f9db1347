"""The target model over mlx-lm: prefill, verify and commit, with the hidden states of the tapped layers.

`MLXTarget` holds what all requests share (weights, taps, limits) and is built once; `session()` gives one request its
own state. Knows the shape of a forward (rows, padding); does not know how states are stored (state.py), how mlx-lm's
models look inside (compat.py), or what is done with the logits. Exact mode is that of docs/exactness.md.

A verify forward is handed to the device without waiting for it; the acceptor waits when it reads the result.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash.backends.mlx import compat
from dflash.backends.mlx.positions import RowRopes
from dflash.backends.mlx.state import SessionCache, check_states, layer_kinds, widest_window
from dflash.backends.mlx.taps import LayerRecorder
from dflash.backends.mlx.tokens import DeviceTokens
from dflash.core.key_lengths import BUCKETS, KeyLengths
from dflash.core.pair import TargetShape, check_prompt, check_taps
from dflash.types import Proposal, Verdict

CLEAR_EVERY = 256
"""Rounds after which MLX's pool of freed buffers is emptied: growing states leave ever larger ones behind."""


_MISUSE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a model may raise that takes positions for a number. It then decodes in chains as if nothing had been tried."""


class MLXTarget:
    """Weights side of a target, shared by sessions.

    Attributes:
        model: the mlx-lm model, in evaluation mode.
        taps: ids z of the tapped layers; a tap is the output of decoder layer z, before the final norm.
        vocab_size, hidden_size, num_layers: of the language model.
        max_length: context limit in tokens.
        layer_kinds: mlx-lm's class of each layer's cache.
        widest_window: tokens of the widest attention window; None if all layers see everything.
        exact_width: least number of rows of a decoding forward in exact mode.
        key_lengths: numbers of keys that attention gets in exact mode.
        fast_rollback: feed kept rows again only to recurrent layers; False: to the whole model, the reference.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_length: int,
        taps: Sequence[int] = (),
        exact_width: int = 1,
        key_lengths: KeyLengths = BUCKETS,
        prefill_chunk: int = 512,
        kv_bits: int | None = None,
        fast_rollback: bool = True,
    ) -> None:
        """
        Args:
            model: a decoder-only language model; put into evaluation mode.
            max_length: context limit (loading.py reads it; mlx-lm's models do not keep it).
            taps: layer ids whose outputs make up the features, in this order.
            exact_width: `WidthClass.width` of exactness.probe.
            key_lengths: `WidthClass.key_lengths` of it.
            prefill_chunk: most rows of one prefill forward.
            kv_bits: quantise keys and values of full attention layers to 4 or 8 bits.

        Raises:
            UnsupportedModel: the model cannot be decoded losslessly by this version.
            PairError: a tap that is no layer of this model.
        """
        assert exact_width >= 1
        assert prefill_chunk >= 1
        compat.check_mlx_lm()
        layers = compat.decoder_layers(model)
        self.model = model
        self.max_length = max_length
        self.num_layers = len(layers)
        self.taps = tuple(taps)
        self.exact_width = exact_width
        self.key_lengths = key_lengths
        self.prefill_chunk = prefill_chunk
        self.kv_bits = kv_bits
        self.fast_rollback = fast_rollback
        natives = compat.layer_caches(model)
        self.layer_kinds = layer_kinds(natives, self.num_layers)
        self.widest_window = widest_window(natives)
        check_states(natives, compat.model_name(model))
        check_taps(self.taps, self.num_layers, compat.model_name(model))
        self._embedding, self._head = compat.embedding_and_head(model)
        self.vocab_size, self.hidden_size = compat.embedding_shape(self._embedding)
        model.eval()
        self.dtype = compat.activation_dtype(model)
        calls = fast_rollback and not SessionCache(natives).keeps_prefixes
        self.recorder = LayerRecorder(layers, self.taps, calls=calls)
        self._lock = threading.Lock()
        self._ropes: RowRopes | None = None
        self._no_trees: str | None = None

    @property
    def shape(self) -> TargetShape:
        """The sizes that a draft depends on."""
        return TargetShape(self.vocab_size, self.hidden_size, self.num_layers)

    @property
    def model_name(self) -> str:
        """mlx-lm's name of the model's family."""
        return compat.model_name(self.model)

    @property
    def no_trees(self) -> str | None:
        """Why this model cannot be fed trees, in a few words; None = it can. Found out by building the graph of one."""
        with self._lock:
            if self._ropes is None:
                ropes = RowRopes(compat.rotary_embeddings(self.model))
                try:
                    self._no_trees = _trial(self.model, self.kv_bits)
                except BaseException:  # interrupted: the next request tries again
                    ropes.close()
                    raise
                if self._no_trees is not None:
                    ropes.close()
                self._ropes = ropes
            return self._no_trees

    @property
    def num_features(self) -> int:
        """Width of a feature row: taps x hidden."""
        return len(self.taps) * self.hidden_size

    def embed_tokens(self, ids: mx.array) -> mx.array:
        """Embed token ids [...] with the target's table; returns [..., H], without the factor of some families."""
        embedded: mx.array = self._embedding(ids)
        return embedded

    def head(self, hidden: mx.array) -> mx.array:
        """The bare language-model head: normed hidden states [..., H] to [..., V], without the scale or cap that
        some families put on their logits."""
        logits: mx.array = self._embedding.as_linear(hidden) if self._head is None else self._head(hidden)
        return logits

    def head_rows(self, ids: mx.array) -> mx.array:
        """Rows `ids` [K] of the head, [K, H]."""
        return compat.head_rows(self._embedding if self._head is None else self._head, ids)

    def session(self, *, exact: bool = True, features: bool = True) -> MLXTargetSession:
        """A fresh session with its own state.

        Args:
            exact: forwards of the shapes that give plain and speculative decoding the same bits.
            features: record the taps; without a drafter nobody reads them.
        """
        return MLXTargetSession(self, exact=exact, features=features)

    def with_taps(self, taps: Sequence[int], *, exact_width: int | None = None) -> MLXTarget:
        """Another target over the same weights that records these layers, to be closed before this one."""
        return MLXTarget(
            self.model,
            max_length=self.max_length,
            taps=taps,
            exact_width=exact_width or self.exact_width,
            key_lengths=self.key_lengths,
            kv_bits=self.kv_bits,
            fast_rollback=self.fast_rollback,
        )

    def close(self) -> None:
        """Leave the model's layers as they were found; sessions made before must not be used any more."""
        self.recorder.close()
        if self._ropes is not None:
            self._ropes.close()
            self._ropes = None


class MLXTargetSession:
    """One request's state of a target; implements `dflash.core.protocols.Target`."""

    def __init__(self, target: MLXTarget, *, exact: bool = True, features: bool = True) -> None:
        self._target = target
        self._exact = exact
        self._features = features and bool(target.taps)
        self._least_width = target.exact_width if exact else 1
        self._cache = _fresh_cache(target.model, target.kv_bits, target.key_lengths)
        self._fed = mx.array([], dtype=mx.int32)  # ids of the last verify, padding included
        self._num_fed = 0  # rows of the last verify that nobody has committed yet
        self._rounds = 0

    @property
    def max_length(self) -> int:
        """Context limit in tokens (prompt + output)."""
        return self._target.max_length

    @property
    def keeps_prefixes(self) -> bool:
        """Whether every layer state can keep a part of a forward; if not, the kept rows are fed again."""
        return self._cache.keeps_prefixes

    @property
    def supports_trees(self) -> bool:
        """Whether every layer state can hold branches, and every layer can be given positions."""
        return self._target.no_trees is None

    @property
    def num_tokens(self) -> int:
        """Committed tokens = position of the anchor."""
        return self._cache.num_tokens

    @property
    def rewinds(self) -> bool:
        """Whether every layer state can take committed tokens back (`rewind`)."""
        return self._cache.rewinds

    def rewind(self, num_tokens: int) -> None:
        """Take all but the first `num_tokens` committed tokens back; only where `rewinds` says so."""
        self._cache.rewind(num_tokens)
        self._num_fed = 0

    def return_at_least(self, num_keys: int) -> None:
        """Let exact forwards attend over at least `num_keys` keys, as they will late in a long text (the probe)."""
        self._cache.return_at_least(num_keys)

    def prefill(self, prompt_ids: Sequence[int]) -> Verdict:
        """Feed and commit the prompt in chunks; behind earlier tokens it continues them (the next turn of a chat).

        The last token goes alone: mlx-lm's models give logits for every row, and a whole vocabulary per row of a chunk
        would be computed for nothing.

        Returns:
            logits [1, V] of the last row; features [len(prompt_ids), taps x hidden] or None without taps.

        Raises:
            PromptError: the prompt is empty or leaves the context.
        """
        check_prompt(len(prompt_ids), self._cache.num_tokens, self.max_length)
        cache, last, ids = self._cache, len(prompt_ids) - 1, mx.array(list(prompt_ids), dtype=mx.int32)
        pieces: list[mx.array] = []
        logits: mx.array | None = None
        starts = [*range(0, last, self._target.prefill_chunk), last]
        for start, end in zip(starts, [*starts[1:], last + 1], strict=True):
            cache.begin(end - start, exact=False)
            logits, features = self._forward(ids[start:end])
            cache.commit(range(end - start))
            if features is not None:
                pieces.append(features)
            if start < last:
                mx.eval([*cache.arrays(), *pieces[-1:]])  # a chunk's graph and buffers must not outlive it
                mx.clear_cache()
        assert logits is not None
        self._num_fed = 0
        return Verdict(logits, mx.concatenate(pieces) if pieces else None)

    def extend(self, ids: mx.array) -> mx.array:
        """Feed and commit a few token ids [rows] that the device may still be computing; logits [V] of the last one.
        Nothing is waited for."""
        assert 0 < self._cache.num_tokens + len(ids) <= self.max_length, "extend needs room in the context"
        self._cache.begin(len(ids), exact=False)
        logits, _ = self._forward(ids)
        self._cache.commit(range(len(ids)))
        self._num_fed = 0
        return logits[-1]

    def verify(self, anchor: int, proposal: Proposal) -> Verdict:
        """Feed anchor + proposal without committing them; what the last verify fed and nobody committed is forgotten.

        Returns:
            logits [rows, V]; features [rows, taps x hidden] or None without taps; rows = len(proposal.tokens) + 1.
        """
        target, cache = self._target, self._cache
        tokens, num_fed = proposal.tokens, len(proposal.tokens) + 1
        tree = None if proposal.parents is None else proposal
        room = target.max_length - max(proposal.depths()) - 1
        assert 0 < cache.num_tokens <= room, "verify needs a prompt and room in the context"
        assert tree is None or self.supports_trees, target.no_trees
        drafted = (
            tokens.array.astype(mx.int32) if isinstance(tokens, DeviceTokens) else mx.array(list(tokens), mx.int32)
        )
        padding = [anchor] * (self._least_width - num_fed)
        ids = mx.concatenate([mx.array([anchor]), drafted, mx.array(padding, dtype=mx.int32)])
        cache.begin(len(ids), exact=self._exact, tree=tree)
        logits, features = self._forward(ids)
        self._fed, self._num_fed = ids, num_fed
        mx.async_eval(logits)
        self._rounds += 1
        if self._rounds % CLEAR_EVERY == 0:
            mx.clear_cache()
        return Verdict(logits[:num_fed], None if features is None else features[:num_fed])

    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows `path` (ascending; empty = none) of those that the last `verify` fed, drop the rest."""
        assert not path or path[-1] < self._num_fed, (path, self._num_fed)
        self._cache.commit(path, self._refeed)
        self._num_fed = 0
        mx.async_eval(self._cache.arrays())

    def close(self) -> None:
        """Free the state; the session is empty afterwards."""
        self._cache.free()
        self._num_fed = 0

    def _refeed(self, num_rows: int) -> None:
        """Feed the first rows of the last forward again: the reference for states that cannot keep a part."""
        self._cache.begin(num_rows, exact=self._exact)
        self._target.model(self._fed[None, :num_rows], cache=self._cache.layers)

    def _forward(self, ids: mx.array) -> tuple[mx.array, mx.array | None]:
        """One forward at the committed length; returns logits [rows, V] and features [rows, taps x H]."""
        target = self._target
        recording: Any = target.recorder.recording() if self._features or target.fast_rollback else nullcontext([])
        with recording as rows:
            logits: mx.array = target.model(ids[None], cache=self._cache.layers)
        features = mx.concatenate([row[0] for row in rows], axis=-1) if self._features else None
        return logits[0], features


def _fresh_cache(model: nn.Module, kv_bits: int | None, lengths: KeyLengths = BUCKETS) -> SessionCache:
    counted_on = compat.offset_use(model) == "counts on"
    return SessionCache(compat.layer_caches(model), kv_bits, counted_on=counted_on, lengths=lengths)


def _trial(model: nn.Module, kv_bits: int | None) -> str | None:
    """Why `model` cannot be fed a tree, or None. Nothing is computed: what a layer does with the positions of a tree,
    apart from turning keys and queries by them, fails while the graph is built."""
    name = compat.model_name(model)
    cache, tree = _fresh_cache(model, kv_bits), Proposal.tree((0, 0, 0), (0, 0, 1))
    for native, layer in zip(compat.layer_caches(model), cache.layers, strict=True):
        if not layer.supports_trees:
            kinds = " and ".join(type(part).__name__ for part in getattr(native, "caches", (native,)))
            return f"a layer of {name} keeps its state in {kinds}, which sums up all rows"
    cache.begin(4, exact=False, tree=tree)
    try:
        model(mx.zeros((1, 4), dtype=mx.int32), cache=cache.layers)
    except _MISUSE as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"layers of {name} use positions for more than a rotary embedding ({what})"
    positions = cache.span.positions
    if positions is not None and positions.was_copied and compat.offset_use(model) is None:
        return f"layers of {name} use positions for more than a rotary embedding"
    return None
