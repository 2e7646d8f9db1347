"""The target model over Transformers: prefill, verify and commit, with the hidden states of the tapped layers.

`TorchTarget` holds what all requests share (weights, taps, limits) and is built once; `session()` gives one request its
own key/value state. Knows the shape of a forward (rows, padding, mask, positions); does not know how states are stored
(state.py), which Transformers is installed (compat.py), or what is done with the logits.

Exact mode (docs/exactness.md): a row's logits depend on the shape of the forward that computed them. Every decoding
forward therefore has at least `exact_width` rows (padding behind the fed ones, never committed) and gets one of
`key_lengths` keys and values with the unused tail masked. Within the width class that exactness.py finds, plain and
speculative decoding then give the same bits. Without exact mode a plain step is one row over the keys written so far
and no mask: the fastest form, to which all speed-ups refer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from transformers import PreTrainedModel

from dflash.backends.torch import compat
from dflash.backends.torch.attention import AttentionForm
from dflash.backends.torch.masks import ModelMask, SessionMasks
from dflash.backends.torch.packing import KernelChoice, kernel_choice
from dflash.backends.torch.replay import Record, Replay
from dflash.backends.torch.state import check_states, session_cache
from dflash.backends.torch.states import KINDS
from dflash.backends.torch.taps import TapRecorder, concatenate, tapped_layers
from dflash.core.key_lengths import BUCKETS, KeyLengths
from dflash.core.pair import check_prompt, check_taps
from dflash.core.tree import row_positions
from dflash.errors import UnsupportedModel
from dflash.types import Proposal, Verdict


class TorchTarget:
    """Weights side of a target, shared by sessions.

    Attributes:
        model: the Transformers model, in evaluation mode.
        taps: ids z of the tapped layers; a tap is the output of decoder layer z, before the final norm.
        vocab_size, hidden_size, num_layers: of the language model.
        max_length: context limit in tokens.
        device, dtype: of the weights.
        exact_width: least number of rows of a decoding forward in exact mode.
        key_lengths: numbers of keys that attention gets in exact mode.
        attention: the form of its masks.
        kernels: tells packed linear layers what a forward's single rows run on.
        packs_single: whether they run packed also where exactness is not asked for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        taps: Sequence[int] = (),
        exact_width: int = 1,
        key_lengths: KeyLengths = BUCKETS,
        packs_single: bool = False,
        prefill_chunk: int = 512,
        replays: bool = True,
    ) -> None:
        """
        Args:
            model: a decoder-only language model; put into evaluation mode.
            taps: layer ids whose outputs make up the features, in this order.
            exact_width: `WidthClass.width` of exactness.probe.
            key_lengths: `WidthClass.key_lengths` of it.
            packs_single: what plain_form.packed_steps_are_faster found.
            prefill_chunk: most rows of one prefill forward.
            replays: roll recurrent layers back by replay.py; without it the kept rows are fed again (the reference).

        Raises:
            UnsupportedModel: the model cannot be decoded losslessly by this version.
            PairError: a tap that is no layer of this model.
        """
        assert exact_width >= 1
        assert prefill_chunk >= 1
        compat.check_transformers()
        config = compat.text_config(model)
        self.model = model
        self.cache_argument = compat.cache_argument(model)
        self.cache_class = session_cache(compat.own_cache(model))
        self.layer_specs = tuple(compat.layer_specs(config))
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.max_length = _context_length(model)
        self._embedding = model.get_input_embeddings()
        self.device = self.embed_weight.device
        self.dtype: torch.dtype = model.dtype
        self.taps = tuple(taps)
        self.exact_width = exact_width
        self.key_lengths = key_lengths
        self.prefill_chunk = prefill_chunk
        check_states(self.layer_specs, type(model).__name__)
        check_taps(self.taps, self.num_layers, type(model).__name__)
        self.attention = compat.use_grouped_attention(model)
        if any(KINDS[spec.state].mask_has_fed_rows for spec in self.layer_specs):
            self.attention = AttentionForm()
        self.kernels = kernel_choice(model) or KernelChoice()
        self.packs_single = packs_single
        model.eval()
        self._head = model.get_output_embeddings()
        if self._head is None:
            raise UnsupportedModel(f"{type(model).__name__} has no language-model head; load it as a causal LM.")
        # Rows beyond the context are padding only; they repeat the last position.
        positions = torch.arange(self.max_length + exact_width, device=self.device)
        self.positions = positions.clamp_(max=self.max_length - 1)[None]  # [1, max_length + exact_width]
        self.recorder = TapRecorder(tapped_layers(model, self.taps, self.num_layers))
        is_recurrent = any(spec.is_recurrent for spec in self.layer_specs)
        self.replay = Replay(model, self.layer_specs) if replays and is_recurrent else None
        # On accelerators so many small kernels would cost more than drafting gains: hybrid targets are not exact there.
        self.rows_alone = self.device.type == "cpu"

    @property
    def num_features(self) -> int:
        """Width of a feature row: taps x hidden."""
        return len(self.taps) * self.hidden_size

    @property
    def model_name(self) -> str:
        """Transformers' name of the model's class."""
        return type(self.model).__name__

    @property
    def layer_kinds(self) -> list[str]:
        """Transformers' class of each layer's cache, in layer order."""
        return [spec.state for spec in self.layer_specs]

    @property
    def widest_window(self) -> int | None:
        """Tokens of the widest attention window; None if all layers see everything."""
        return max((spec.window for spec in self.layer_specs if spec.window is not None), default=None)

    def with_taps(self, taps: Sequence[int], *, exact_width: int | None = None) -> TorchTarget:
        """Another target over the same weights that records these layers, to be closed before this one."""
        return TorchTarget(
            self.model, taps=taps, exact_width=exact_width or self.exact_width, key_lengths=self.key_lengths
        )

    @property
    def embed_weight(self) -> torch.Tensor:
        """Embedding table, [V, H]."""
        weight = self._embedding.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    @property
    def head_weight(self) -> torch.Tensor:
        """Rows of the language-model head, [V, H]; the same memory as `embed_weight` where they are tied."""
        weight = self._head.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def embed_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """Embed token ids [...] as the target itself does; returns [..., H]."""
        embedded: torch.Tensor = self._embedding(ids)
        return embedded

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The bare language-model head: normed hidden states [..., H] to [..., V], without the scale or cap that
        some families put on their logits."""
        logits: torch.Tensor = self._head(hidden)
        return logits

    def session(self, *, exact: bool = True, features: bool = True) -> TorchTargetSession:
        """A fresh session with its own state.

        Args:
            exact: forwards of the shapes that give plain and speculative decoding the same bits.
            features: record the taps; without a drafter nobody reads them.
        """
        return TorchTargetSession(self, exact=exact, features=features)

    def close(self) -> None:
        """Remove the hooks from the model; sessions made before must not be used any more."""
        self.recorder.close()
        if self.replay is not None:
            self.replay.close()


class TorchTargetSession:
    """One request's state of a target; implements `dflash.core.protocols.Target`."""

    def __init__(self, target: TorchTarget, *, exact: bool = True, features: bool = True) -> None:
        self._target = target
        self._exact = exact
        self._features = features and bool(target.taps)
        self._least_width = target.exact_width if exact else 1
        self._cache = target.cache_class(target.layer_specs, target.key_lengths)
        self._masks = SessionMasks(target.layer_specs, target.device, target.dtype, target.attention)
        self._fed: list[int] = []  # tokens that the last verify fed and nobody has committed yet
        self._record: Record | None = None  # of the last verify, where recurrent layers may have to run again

    @property
    def max_length(self) -> int:
        """Context limit in tokens (prompt + output)."""
        return self._target.max_length

    @property
    def num_tokens(self) -> int:
        """Committed tokens = position of the anchor."""
        return self._cache.num_tokens

    @property
    def capacity(self) -> int:
        """Keys that the state holds without growing."""
        return self._cache.capacity

    @property
    def supports_trees(self) -> bool:
        """Whether every layer state can hold branches."""
        return self._cache.supports_trees

    @property
    def rewinds(self) -> bool:
        """Whether every layer state can take committed tokens back (`rewind`)."""
        return self._cache.rewinds

    def rewind(self, num_tokens: int) -> None:
        """Take all but the first `num_tokens` committed tokens back; only where `rewinds` says so."""
        self._cache.rewind(num_tokens)
        self._fed, self._record = [], None

    def return_at_least(self, num_keys: int, lead: int = 0) -> None:
        """Let exact forwards attend over at least `num_keys` keys, as they will late in a long text, and layers with a
        window over `lead` more in front; the latter before the first token is fed (the probe)."""
        self._cache.return_at_least(num_keys, lead)

    @torch.inference_mode()
    def prefill(self, prompt_ids: Sequence[int]) -> Verdict:
        """Feed and commit the prompt in chunks; behind earlier tokens it continues them (the next turn of a chat).

        Returns:
            logits [1, V] of the last row; features [len(prompt_ids), taps x hidden] or None without taps.

        Raises:
            PromptError: the prompt is empty or leaves the context.
        """
        check_prompt(len(prompt_ids), self._cache.num_tokens, self.max_length)
        target, cache = self._target, self._cache
        features: torch.Tensor | None = None
        if self._features:
            features = torch.empty(len(prompt_ids), target.num_features, device=target.device, dtype=target.dtype)
        cache.reserve(cache.num_tokens + len(prompt_ids))
        ids = torch.tensor([list(prompt_ids)], device=target.device)
        logits: torch.Tensor | None = None
        for start in range(0, len(prompt_ids), target.prefill_chunk):
            chunk = ids[:, start : start + target.prefill_chunk]
            cache.begin(chunk.shape[1], exact=False)
            # Without a mask Transformers makes its own, and the first chunk runs the kernel for causal attention.
            logits, rows = self._forward(chunk, None, logits_to_keep=self._last_row(chunk.shape[1]))
            if features is not None:
                taken = concatenate(rows, target.device)
                assert len(taken) == chunk.shape[1], "a tapped layer ran for a part of the rows"
                features[start : start + chunk.shape[1]] = taken
            cache.commit(range(chunk.shape[1]))
        assert logits is not None
        self._fed = []
        return Verdict(logits[0, -1:], features)

    @torch.inference_mode()
    def verify(self, anchor: int, proposal: Proposal) -> Verdict:
        """Feed anchor + proposal without committing them; what the last verify fed and nobody committed is forgotten.

        Returns:
            logits [rows, V]; features [rows, taps x hidden] or None without taps; rows = len(proposal.tokens) + 1.
        """
        ids = [anchor, *proposal.tokens]
        room = self.max_length - max(proposal.depths()) - 1
        assert 0 < self._cache.num_tokens <= room, "verify needs a prompt and room in the context"
        assert proposal.parents is None or self.supports_trees
        replay = self._target.replay
        alone = len(ids) if self._exact and self._target.rows_alone else 0
        with nullcontext() if replay is None else replay.recording(alone) as self._record:
            logits, rows = self._feed(anchor, proposal)
        self._fed = ids
        features = concatenate(rows, self._target.device)[: len(ids)] if self._features else None
        return Verdict(logits[0, : len(ids)], features)

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows `path` (ascending; empty = none) of those that the last `verify` fed, drop the rest."""
        assert not path or path[-1] < len(self._fed), (path, len(self._fed))
        if not self._cache.keeps(path):
            self._run_again(len(path))
        self._cache.commit(path)
        self._fed, self._record = [], None

    def _last_row(self, num_rows: int) -> int | torch.Tensor:
        """Which rows' logits a prefill forward needs. Where features are recorded, by an index instead of a count:
        given a count, Gemma 4 runs its last layers, which share keys and values, for those rows only."""
        return torch.tensor([num_rows - 1], device=self._target.device) if self._features else 1

    def _run_again(self, num_kept: int) -> None:
        """Bring the states to where only the first rows of the last verify were fed: recurrent layers on their recorded
        inputs, or the whole model on the kept tokens."""
        replay = self._target.replay
        if self._record is not None and replay is not None and replay.covers(self._cache):
            replay.run(self._record, self._cache, num_kept)
        else:
            anchor, *accepted = self._fed[:num_kept]
            self._feed(anchor, Proposal(tuple(accepted)), pad=False)

    def close(self) -> None:
        """Free the state; the session is empty afterwards."""
        self._cache.free()
        target = self._target
        self._masks = SessionMasks(target.layer_specs, target.device, target.dtype, target.attention)
        self._fed, self._record = [], None

    def _feed(self, anchor: int, proposal: Proposal, *, pad: bool = True) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Feed rows behind the committed tokens, in exact mode in a forward of the shape that it needs."""
        target, cache = self._target, self._cache
        ids = [anchor, *proposal.tokens]
        width = max(len(ids), self._least_width if pad else 1)
        cache.begin(width, exact=self._exact)
        mask: ModelMask = None
        if self._exact or width > 1:
            num_rows = target.attention.num_rows(width, exact=self._exact)
            mask = self._masks.of(cache, num_rows, proposal)
        ids += [anchor] * (width - len(ids))
        positions = None
        if proposal.parents is not None:
            positions = torch.tensor([row_positions(cache.num_tokens, width, proposal)], device=target.device)
        return self._forward(torch.tensor([ids], device=target.device), mask, positions)

    def _forward(
        self,
        ids: torch.Tensor,  # [1, rows]
        mask: ModelMask,  # rows or more
        positions: torch.Tensor | None = None,  # [1, rows]; None = one after the other
        **options: int | torch.Tensor,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One forward at the committed length; returns logits [1, rows, V] and one [1, rows, H] per tap."""
        target, start = self._target, self._cache.num_tokens
        arguments = {target.cache_argument: self._cache, "attention_mask": mask, "use_cache": True, **options}
        target.kernels.packs_single = self._exact or target.packs_single
        if positions is None:
            positions = target.positions[:, start : start + ids.shape[1]]
        if not self._features:
            output = target.model(input_ids=ids, position_ids=positions, **arguments)
            return output.logits.to(target.device), []
        with target.recorder.recording() as rows:
            output = target.model(input_ids=ids, position_ids=positions, **arguments)
        return output.logits.to(target.device), rows


def _context_length(model: PreTrainedModel) -> int:
    """Context limit of `model`.

    Raises:
        UnsupportedModel: no limit is given, or the rotary frequencies depend on the length of a forward, so that a
            block that crosses a limit would differ from single steps.
    """
    config = compat.text_config(model)
    length: int | None = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise UnsupportedModel(
            f"the configuration of {type(model).__name__} gives no max_position_embeddings; add the context length."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    rope_types = {rope.get("rope_type"), *(part.get("rope_type") for part in rope.values() if isinstance(part, dict))}
    if found := rope_types & {"dynamic", "longrope"}:
        raise UnsupportedModel(
            f"rotary embedding {found.pop()!r} changes with the length of a forward, so that blocks cannot equal "
            "single steps; use a target with a fixed rope_type (default, linear, yarn, llama3)."
        )
    return length
