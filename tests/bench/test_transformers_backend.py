"""Transformers' own DFlash as a peer: the same network under other names, driven by nothing of ours.

The draft is overfitted to one answer, so that it is accepted often: only then does a tensor in the wrong place, a tap
one layer off or a block one slot too long show, as other rounds than those of this package's own loop.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import dflash
from dflash import Drafting, SamplingParams
from dflash.backends.torch.loading import open_target
from dflash.backends.torch.target import TorchTarget
from dflash.bench.backends import transformers as native
from dflash.bench.protocol import BackendOptions, Cancelled, Request, RequestFailed, Sampling
from dflash.core.draft_config import WEIGHTS_FILE
from dflash.errors import CheckpointError, ConfigError, MissingExtra, UnsupportedModel
from tests.backends.tiny_pair import (
    CONTEXT,
    NUM_LAYERS,
    draft_config,
    random_draft,
    save_draft,
    save_target,
    train_draft,
)

NUM_TOKENS = 40
QUESTION = "Hello"
TAPS = (0, 1)
"""Without the last layer, which Transformers hands over after the final norm."""

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, f"{native.DRAFT_CLASS}Model"), reason="this Transformers has no DFlash of its own"
)


def request(text: str = QUESTION, **sampling: object) -> Request:
    values = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
    return Request(messages=({"role": "user", "content": text},), sampling=Sampling(**values))  # type: ignore[arg-type]


def options(target: Path, draft: Path) -> BackendOptions:
    return BackendOptions(target=str(target), draft=str(draft), dtype="float32", device="cpu", threads=1)


def silent(what: str, share: float | None) -> None:
    """Progress that nobody looks at."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target, and a draft overfitted to its answer to QUESTION."""
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(folder / "target")
    engine = dflash.load(str(target), None, dtype="float32", device="cpu", num_threads=1)
    prompt = engine.tokenize(QUESTION)
    answer = engine.generate(QUESTION, SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)).token_ids
    network = random_draft(draft_config(target_layer_ids=TAPS))
    tapped = TorchTarget(open_target(str(target), dtype="float32", device="cpu").model, taps=TAPS)
    train_draft(network, tapped, [(prompt, answer)])
    return target, save_draft(folder / "draft", network)


@pytest.fixture(scope="module")
def backend(folders: tuple[Path, Path]) -> Iterator[native.TransformersBackend]:
    opened = native.open_backend(options(*folders), silent)
    yield opened
    opened.close()


def test_same_rounds_as_this_package(backend: native.TransformersBackend, folders: tuple[Path, Path]) -> None:
    """Guards against a comparison of two different drafts: the peer must propose what our own loop proposes."""
    target, draft = folders
    engine = dflash.load(str(target), str(draft), dtype="float32", device="cpu", num_threads=1)
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    ours = engine.generate(QUESTION, params, drafting=Drafting(fixed=True))
    theirs = backend.generate(request(), "native")
    assert theirs.token_ids == tuple(ours.token_ids)
    assert theirs.text == ours.text
    assert theirs.rounds is not None
    assert theirs.rounds.num_rounds == ours.stats.num_rounds
    assert theirs.rounds.num_accepted == ours.stats.num_accepted
    assert ours.stats.acceptance_length > 2, "a draft that is never accepted proves nothing"


def test_both_forms_give_one_text(backend: native.TransformersBackend) -> None:
    """Guards against forms that run different weights or stop in different places."""
    plain, drafted = (backend.generate(request(), form.name) for form in backend.forms)
    assert plain.token_ids == drafted.token_ids
    assert plain.num_tokens == drafted.num_tokens == NUM_TOKENS
    assert plain.finish_reason == drafted.finish_reason == "length"
    assert plain.rounds is not None and plain.rounds.num_accepted == 0
    assert backend.forms[1].reference == backend.forms[0].name


def test_figures_agree(backend: native.TransformersBackend) -> None:
    """Guards against counting the prefill's token as a round, or a round's tokens twice."""
    answer = backend.generate(request(), "native")
    rounds = answer.rounds
    assert rounds is not None and rounds.lengths is not None and rounds.accepted_per_slot is not None
    assert rounds.num_tokens == NUM_TOKENS - 1
    assert sum(rounds.lengths.values()) == rounds.num_rounds
    assert sum(rounds.accepted_per_slot) == rounds.num_accepted
    assert len(rounds.accepted_per_slot) == 7
    assert answer.first_token_seconds is not None and answer.decode_seconds is not None
    assert answer.first_token_seconds + answer.decode_seconds == pytest.approx(answer.total_seconds)
    assert rounds.draft_seconds is None


def test_stops_at_the_end_token(backend: native.TransformersBackend) -> None:
    """Guards against texts that end in a special token, and against going on after it."""
    plain = backend.generate(request(), "plain")
    assert plain.token_ids is not None
    backend._loaded.model.generation_config.eos_token_id = [plain.token_ids[9]]
    try:
        first = plain.token_ids.index(plain.token_ids[9])
        for form in backend.forms:
            answer = backend.generate(request(ignore_eos=False), form.name)
            assert answer.token_ids == tuple(plain.token_ids[: first + 1])
            assert answer.finish_reason == "stop"
    finally:
        backend._loaded.model.generation_config.eos_token_id = None


def test_sampling_is_passed_on(backend: native.TransformersBackend) -> None:
    """Guards against greedy answers to requests for samples."""
    drawn = [backend.generate(request(temperature=1.5, seed=seed), "plain").token_ids for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert backend.generate(request(temperature=1.5, top_k=1), "native").token_ids == (
        backend.generate(request(), "plain").token_ids
    )


def test_prompt_that_does_not_fit(backend: native.TransformersBackend) -> None:
    """Guards against an index error inside the model."""
    with pytest.raises(RequestFailed, match="do not fit"):
        backend.generate(request("x" * CONTEXT), "native")


def test_cancelling(backend: native.TransformersBackend) -> None:
    """Guards against a Ctrl-C that waits for the longest answer."""
    asked = request()
    asked.cancelled.set()
    with pytest.raises(Cancelled):
        backend.generate(asked, "native")
    assert isinstance(asked.cancelled, threading.Event)


def test_where_it_reads_the_draft_otherwise(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Guards against blaming the peer's loop for a tap that it reads after the final norm."""
    last = save_draft(tmp_path / "last", random_draft(draft_config(target_layer_ids=(0, NUM_LAYERS - 1))))
    opened = native.open_backend(options(folders[0], last), silent)
    assert any("after the final norm" in note for note in opened.info().notes)
    assert not any("final norm" in note for note in native.open_backend(options(*folders), silent).info().notes)


def test_damaged_drafts(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Guards against random numbers in place of a missing tensor, which would only look like a bad draft."""
    draft = save_draft(tmp_path / "draft", random_draft(draft_config(target_layer_ids=TAPS)))
    tensors = load_file(draft / WEIGHTS_FILE)
    tensors.pop("fc.weight")
    save_file(tensors, draft / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        native.open_backend(options(folders[0], draft), silent)


def test_drafts_that_the_class_cannot_compute(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Guards against running another network than the draft's, which would only look like a bad draft."""
    raw = draft_config(target_layer_ids=TAPS, input_embedding_scale=2.0)
    with pytest.raises(UnsupportedModel, match="scaled embeddings"):
        native.open_backend(options(folders[0], save_draft(tmp_path / "scaled", random_draft(raw))), silent)


def test_options_without_effect(folders: tuple[Path, Path]) -> None:
    """Guards against options that are accepted and ignored."""
    with pytest.raises(ConfigError, match="--width"):
        native.open_backend(BackendOptions(target=str(folders[0]), width=4), silent)
    with pytest.raises(ConfigError, match="--target"):
        native.open_backend(BackendOptions(), silent)


def test_transformers_without_dflash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an AttributeError on versions before 5.19."""
    monkeypatch.setattr(native, "DRAFT_CLASS", "NoSuchAssistant")
    with pytest.raises(MissingExtra, match=r"5\.19"):
        native.draft_classes()


def test_grad_is_left_alone(backend: native.TransformersBackend) -> None:
    """Guards against switching autograd off for the whole process."""
    backend.generate(request(max_new_tokens=2), "plain")
    assert torch.is_grad_enabled()
