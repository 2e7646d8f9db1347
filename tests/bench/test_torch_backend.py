"""The PyTorch engine as a backend of the benchmark: three forms, one text, figures that agree with one another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dflash.bench.backends.torch import TorchBackend, open_backend
from dflash.bench.protocol import BackendOptions, Cancelled, Request, RequestFailed, Sampling
from dflash.cache import file_sha256
from dflash.core.exactness import WidthClass
from dflash.errors import ConfigError
from tests.backends.tiny_pair import TEMPLATE, save_draft, save_target

THINKING = TEMPLATE.replace("<|assistant|>{% endif", "<|assistant|>{% if enable_thinking %}<t>{% endif %}{% endif")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return save_target(folder / "target", template=THINKING), save_draft(folder / "draft")


@pytest.fixture(scope="module")
def backend(folders: tuple[Path, Path]) -> Iterator[TorchBackend]:
    target, draft = folders
    opened = open_backend(options(target, draft), lambda what, share: None)
    yield opened
    opened.close()


def options(target: Path, draft: Path) -> BackendOptions:
    return BackendOptions(target=str(target), draft=str(draft), dtype="float32", device="cpu", threads=1)


def request(text: str = "Hello", **sampling: object) -> Request:
    values = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
    return Request(messages=({"role": "user", "content": text},), sampling=Sampling(**values))  # type: ignore[arg-type]


def test_forms_give_one_text(backend: TorchBackend) -> None:
    """Guards against forms that run different weights or prompts, and against a reference that is no plain form."""
    plain = [form.name for form in backend.forms if form.kind == "plain"]
    drafted = [form for form in backend.forms if form.kind == "speculative"]
    assert [(form.name, form.reference) for form in drafted] == [("dflash", plain[-1]), ("dflash-fixed", plain[-1])]
    answers = {form.name: backend.generate(request(), form.name) for form in backend.forms}
    assert len({answer.token_ids for answer in answers.values()}) == 1
    assert answers["dflash"].num_tokens == 24


def test_a_draft_is_used_in_the_speculative_form_only(backend: TorchBackend) -> None:
    """Guards against a speed-up of plain decoding over itself."""
    plain, drafted = (backend.generate(request(), form).rounds for form in ("plain", "dflash"))
    assert plain is not None and drafted is not None
    assert plain.num_proposed == 0
    assert drafted.num_proposed


@pytest.mark.parametrize(
    ("holds", "names"),
    [(True, ["plain", "plain-exact", "dflash", "dflash-fixed"]), (False, ["plain", "dflash", "dflash-fixed"])],
)
def test_both_plain_forms_are_measured_where_there_are_two(
    backend: TorchBackend, holds: bool, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against dividing by the slower plain form: which one that is depends on the machine."""
    exactness = WidthClass(holds, 1, (1, 8), "said by the test")
    monkeypatch.setattr(backend._engine, "info", replace(backend._engine.info, exactness=exactness))
    assert [form.name for form in backend.forms] == names
    assert backend.forms[-1].reference == names[-3]


def test_figures_agree(backend: TorchBackend) -> None:
    """Guards against times and counts that do not belong together."""
    answer = backend.generate(request(), "dflash")
    rounds = answer.rounds
    assert rounds is not None and rounds.lengths is not None and rounds.draft_seconds is not None
    assert sum(rounds.lengths.values()) == rounds.num_rounds
    assert sum(length * count for length, count in rounds.lengths.items()) == rounds.num_tokens == 23
    assert answer.first_token_seconds is not None and answer.decode_seconds is not None
    assert 0 < answer.first_token_seconds < answer.total_seconds
    assert answer.first_token_seconds + answer.decode_seconds <= answer.total_seconds
    assert backend.counters("dflash") is None


def test_info_names_the_weights(backend: TorchBackend, folders: tuple[Path, Path]) -> None:
    """Guards against a record from which nobody can tell which weights ran."""
    info = backend.info()
    assert info.target is not None and info.draft is not None
    assert info.target.sha256 == file_sha256(folders[0] / "model.safetensors")
    assert info.draft.sha256 == file_sha256(folders[1] / "model.safetensors")
    assert (info.block_size, info.dtype, info.num_threads) == (8, "float32", 1)


def test_peak_memory_is_of_now(backend: TorchBackend) -> None:
    """Guards against a peak in the wrong unit: this process needs more than 50 MB and less than 100 GB."""
    backend.start_memory()
    peak = backend.peak_memory_bytes()
    assert peak is not None
    assert 50e6 < peak < 100e9


def test_thinking_reaches_the_template(backend: TorchBackend) -> None:
    """Guards against --thinking being accepted and ignored."""
    on, off = (backend.generate(request(thinking=value), "plain").num_prompt_tokens for value in (True, False))
    assert on is not None and off is not None
    assert on == off + len("<t>")


def test_thinking_without_a_switch_is_refused(folders: tuple[Path, Path]) -> None:
    """Guards against two runs that differ in name only."""
    opened = open_backend(options(*folders), lambda what, share: None)
    opened._engine.tokenizer.chat_template = TEMPLATE
    with pytest.raises(ConfigError, match="no switch for thinking"):
        opened.generate(request(thinking=True), "plain")
    opened.close()


def test_a_prompt_too_long_is_one_failed_request(backend: TorchBackend) -> None:
    """Guards against a run that one long prompt ends."""
    with pytest.raises(RequestFailed) as caught:
        backend.generate(request("x" * 5000), "dflash")
    assert caught.value.kind == "prompt"


def test_cancelling_frees_the_request(backend: TorchBackend) -> None:
    """Guards against a cancelled request that counts as done, and against state that stays behind it."""
    before = backend.generate(request(), "dflash").token_ids
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(Cancelled):
        backend.generate(replace(request(), cancelled=given_up), "dflash")
    assert backend.generate(request(), "dflash").token_ids == before


def test_seeds_change_the_text_and_not_the_form(backend: TorchBackend) -> None:
    """Guards against a seed that is dropped on the way, and backs `same_seed_same_text`."""
    assert backend.same_seed_same_text
    texts = {
        seed: {backend.generate(request(temperature=1.0, seed=seed), form).token_ids for form in ("plain", "dflash")}
        for seed in (1, 2)
    }
    assert [len(found) for found in texts.values()] == [1, 1]
    assert texts[1] != texts[2]


def test_options_of_servers_are_refused(folders: tuple[Path, Path]) -> None:
    """Guards against options that are accepted and have no effect."""
    for change in ({"url": "http://localhost:1"}, {"model": "m"}, {"stream": False}, {"tokenizer": "t"}):
        with pytest.raises(ConfigError, match="no effect on --backend torch"):
            open_backend(replace(options(*folders), **change), lambda what, share: None)
