"""The audit passes what is lossless and catches a fault in each part of decoding, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dflash.audit.run import AuditReport, Workload, audit
from dflash.backends.torch.engine import TorchEngine
from dflash.backends.torch.masks import BlockMask
from dflash.core.drafting import CopyDrafter
from dflash.core.engine import Engine
from dflash.core.protocols import Acceptor
from dflash.errors import ConfigError
from dflash.types import Acceptance, Proposal, SamplingParams, Verdict
from tests.audit.subjects import NUM_TOKENS, PROMPTS, engine_of, mlx_engine_of
from tests.backends.tiny_targets import llama

WORK = Workload(max_new_tokens=NUM_TOKENS, num_runs=8)
GREEDY_WORK = Workload(max_new_tokens=NUM_TOKENS // 2, num_runs=1)
"""For faults that show without sampling."""


@pytest.fixture(scope="module", params=["torch", "mlx"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "torch":
        return engine_of(llama(max_length=256))
    pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
    return mlx_engine_of("Llama with windows")


@pytest.fixture(scope="module")
def torch_engine() -> TorchEngine:
    return engine_of(llama(max_length=256))


@pytest.fixture(scope="module")
def clean(engine: Engine) -> AuditReport:
    return audit(engine, PROMPTS, WORK)


def test_a_lossless_engine_passes(engine: Engine, clean: AuditReport) -> None:
    """Guards against false alarms, and against an audit that looks at nothing."""
    assert clean.failures == []
    assert clean.passed
    assert clean.must_agree
    has_trees = engine.target.session().supports_trees
    forms = ["whole blocks", "as loaded", "all guesses", *(["trees"] if has_trees else [])]
    assert [text.form for text in clean.texts] == forms * 2
    assert [text.num_tokens for text in clean.texts] == [NUM_TOKENS] * len(clean.texts)
    assert all(text.difference is None and text.stranger is None for text in clean.texts)
    blocks = [text for text in clean.texts if text.form == "whole blocks"]
    assert all(1.5 < text.acceptance_length < 5 for text in blocks), "the drafter must be right and wrong"
    for form in forms[2:]:
        texts = [text for text in clean.texts if text.form == form]
        assert sum(text.num_guesses for text in texts) > 20
        assert sum(text.num_copied for text in texts) > 0 or engine.backend == "mlx", "torch's texts repeat"
        assert (sum(text.num_branch_rows for text in texts) > 0) == (form == "trees")
    assert sum(clean.widths.kinds.values()) == len(engine.target.layer_kinds) >= 2
    assert clean.widths.num_rows == 32
    if engine.info.exact:
        assert clean.widths.num_equal == 32
    assert sorted(width for one in clean.widths.classes for width in one) == [*range(1, 9), 15, 16]
    assert [law.num_runs for law in clean.laws] == [8, 200]
    assert clean.laws[0].num_tokens == 32
    assert clean.laws[1].num_tokens >= 200
    assert len(clean.rollbacks) == (1 if engine.target.widest_window is None else 2)
    assert all(rollback.num_cases >= 4 for rollback in clean.rollbacks)
    assert clean.window_covered
    assert [tree.num_paths for tree in clean.trees] == [5] * (len(clean.rollbacks) if has_trees else 0)
    assert clean.share.num_tokens == 2 * NUM_TOKENS


def test_without_a_draft_there_is_nothing_to_audit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an audit that compares plain decoding with itself."""
    monkeypatch.setattr(engine, "drafter", None)
    with pytest.raises(ConfigError, match="no draft"):
        audit(engine, PROMPTS, WORK)


def test_copies_alone_can_be_audited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an audit that needs a draft of blocks, or one of copies in which nothing is ever copied."""
    monkeypatch.setattr(engine, "drafter", CopyDrafter())
    report = audit(engine, PROMPTS[:1], Workload(max_new_tokens=NUM_TOKENS, num_runs=4))
    assert report.failures == []
    assert all(text.num_guesses > 0 for text in report.texts if text.form in ("all guesses", "trees"))


def test_progress_is_told(torch_engine: TorchEngine) -> None:
    """Guards against minutes of silence."""
    told: list[tuple[str, float | None]] = []
    audit(torch_engine, PROMPTS[:1], Workload(max_new_tokens=2, num_runs=1), progress=lambda *step: told.append(step))
    assert len({what for what, _ in told}) == 4
    assert told[-1] == ("sampling", 1.0)


def caught(engine: Engine, *words: str, work: Workload = GREEDY_WORK) -> None:
    """The audit must fail and say each of these words in one of its failures."""
    report = audit(engine, PROMPTS[:1], work)
    assert not report.passed
    for word in words:
        assert any(word in failure for failure in report.failures), report.failures


def test_a_row_that_sees_the_next_one_is_caught(torch_engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the mask: both forms of decoding have it, so only the bare model can tell."""
    rows = BlockMask.rows

    def leaking(self: BlockMask, start: int, num_rows: int, num_keys: int, capacity: int) -> torch.Tensor:
        mask = rows(self, start, num_rows, num_keys, capacity).clone()
        for row in range(num_rows - 1):
            mask[0, 0, row, start + row + 1] = 0
        return mask

    monkeypatch.setattr(BlockMask, "rows", leaking)
    caught(torch_engine, "bare model")


def test_a_row_that_misses_a_key_is_caught(torch_engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The opposite fault: the first token of the prompt is hidden, so that texts still look fine."""
    rows = BlockMask.rows

    def blind(self: BlockMask, start: int, num_rows: int, num_keys: int, capacity: int) -> torch.Tensor:
        mask = rows(self, start, num_rows, num_keys, capacity).clone()
        mask[..., 0] = torch.finfo(mask.dtype).min
        return mask

    monkeypatch.setattr(BlockMask, "rows", blind)
    caught(torch_engine, "bare model")


def test_a_branch_that_sees_another_one_is_caught(torch_engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the mask of trees: no chain shows it."""
    monkeypatch.setattr("dflash.backends.torch.masks.tree_mask", lambda mask, start, parents: mask)
    caught(torch_engine, "in a tree")


class Tampered:
    """An acceptor whose decisions are changed."""

    def __init__(self, right: Acceptor, change: Callable[[Proposal, Acceptance], Acceptance]) -> None:
        self._right, self._change = right, change

    def accept(self, proposal: Proposal, verdict: Verdict) -> Acceptance:
        return self._change(proposal, self._right.accept(proposal, verdict))


def tamper(
    monkeypatch: pytest.MonkeyPatch,
    engine: Engine,
    change: Callable[[Proposal, Acceptance], Acceptance],
    *,
    sampled_only: bool = False,
) -> None:
    make = engine.acceptor

    def acceptor(params: SamplingParams, prompt_ids: Sequence[int]) -> Any:
        right = make(params, prompt_ids)
        return right if sampled_only and params.temperature == 0 else Tampered(right, change)

    monkeypatch.setattr(engine, "acceptor", acceptor)


def test_an_acceptor_that_takes_one_too_many_is_caught(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the acceptor: the first guess always stands."""

    def lenient(proposal: Proposal, right: Acceptance) -> Acceptance:
        return right if right.num_accepted or not proposal.tokens else Acceptance.chain(1, right.next_token)

    tamper(monkeypatch, engine, lenient)
    caught(engine, "instead of", "bare model says")


def test_copies_that_are_believed_are_caught(torch_engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that whole blocks of the draft never show: the first copy of a round is taken without being verified."""

    def believing(proposal: Proposal, right: Acceptance) -> Acceptance:
        if proposal.parents is not None or "copy" not in proposal.sources:
            return right
        return Acceptance.chain(max(right.num_accepted, 1 + proposal.sources.index("copy")), right.next_token)

    tamper(monkeypatch, torch_engine, believing)
    report = audit(torch_engine, PROMPTS, Workload(max_new_tokens=NUM_TOKENS, num_runs=1))
    wrong = {text.form for text in report.texts if not text.passed}
    assert "all guesses" in wrong
    assert "whole blocks" not in wrong


def test_an_acceptor_that_is_wrong_with_and_without_a_draft_is_caught(
    torch_engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both forms say the neighbour of the best token, so that their texts agree."""
    size = torch_engine.target.vocab_size
    tamper(monkeypatch, torch_engine, lambda proposal, right: Acceptance.chain(0, (right.next_token + 1) % size))
    caught(torch_engine, "bare model says")


def test_biased_sampling_is_caught(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault at temperatures above 0 only: six of ten rejected guesses are taken nevertheless. Greedy texts are
    right, so the chi-square test must see it."""
    luck = np.random.default_rng(0)

    def biased(proposal: Proposal, right: Acceptance) -> Acceptance:
        if right.num_accepted or not proposal.tokens or luck.random() > 0.6:
            return right
        return Acceptance.chain(1, right.next_token)

    tamper(monkeypatch, engine, biased, sampled_only=True)
    caught(engine, "target's law", work=WORK)


def test_a_width_class_that_does_not_hold_is_caught(torch_engine: TorchEngine) -> None:
    """A fault in what is promised: narrow forwards take another path after the probe has run."""
    if not torch_engine.info.exact:
        pytest.skip("no width class on this machine")
    layer = torch_engine.target.model.get_decoder().layers[1].mlp
    hook = layer.register_forward_hook(lambda module, inputs, out: out + 1e-5 * (out.shape[1] < 6))
    try:
        caught(torch_engine, "layer 1")
    finally:
        hook.remove()


@pytest.mark.parametrize("fault", ["positions", "path"])
def test_a_fault_in_the_trees_of_mlx_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a tree at the position of their row, a kept path that does not move together: no chain shows them."""
    pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
    places = "dflash.backends.mlx.state"
    engine = mlx_engine_of("Llama with windows")
    if fault == "positions":
        monkeypatch.setattr(f"{places}.row_positions", lambda start, num_rows, tree: range(start, start + num_rows))
    else:
        monkeypatch.setattr(f"{places}s.keyvalue.is_prefix", lambda path: True)
    caught(engine, "in a tree")
    engine.close()


@pytest.mark.parametrize("fault", ["keys", "recurrence", "mask"])
def test_a_fault_in_the_states_of_mlx_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a window one row too few after a rejection, a recurrent state that keeps rejected rows, a row that sees
    the next one."""
    pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
    from dflash.backends.mlx.states.keyvalue import KeyValueState
    from dflash.backends.mlx.states.recurrent import RecurrentState

    engine = mlx_engine_of("Qwen3.5" if fault == "recurrence" else "Llama with windows")
    if fault == "keys":
        commit = KeyValueState.commit

        def lost(self: KeyValueState, path: Sequence[int]) -> None:
            commit(self, path)
            if 0 < len(path) < self.span.num_rows and self.window is not None:
                assert self.keys is not None and not isinstance(self.keys, tuple)
                at = self.span.start + len(path) - 1 - self._base
                self.keys[..., at, :] = self.keys[..., at + 1, :]

        monkeypatch.setattr(KeyValueState, "commit", lost)
    elif fault == "recurrence":
        monkeypatch.setattr(RecurrentState, "keeps_prefixes", True)
        monkeypatch.setattr(RecurrentState, "commit", lambda self, path: None)
    else:
        make_mask = KeyValueState.make_mask

        def leaking(self: KeyValueState, *arguments: Any, **keywords: Any) -> Any:
            mask = make_mask(self, *arguments, **keywords)
            return mask if mask is None or isinstance(mask, str) else mask | (mask.cumsum(axis=-1) == 0)

        monkeypatch.setattr(KeyValueState, "make_mask", leaking)
    caught(engine, {"keys": "RotatingKVCache", "recurrence": "ArraysCache", "mask": "bare model"}[fault])
    engine.close()


def test_layers_without_a_state_of_their_own() -> None:
    """Guards against rows that are cut into as many layers as there are states: Nemotron-H's feed-forward layers keep
    none."""
    pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
    engine = mlx_engine_of("Nemotron-H")
    report = audit(engine, PROMPTS[:1], Workload(max_new_tokens=4, num_runs=1))
    assert report.failures == []
    assert sum(report.widths.kinds.values()) == engine.target.num_layers
    engine.close()


def test_quantised_keys_and_values_are_not_the_bare_models() -> None:
    """Guards against a fault that is none: the bare model does not quantise them."""
    pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
    engine: Any = mlx_engine_of("Llama")
    engine.target.kv_bits = 8
    with pytest.raises(ConfigError, match="load without kv_bits"):
        audit(engine, PROMPTS, WORK)
    engine.close()
