"""This package's engines as backends of the benchmark: forms over one text, figures that agree with one another."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dflash.bench.own_engine import OwnBackend
from dflash.bench.protocol import BackendOptions, Cancelled, Request, RequestFailed, Sampling
from dflash.cache import file_sha256
from dflash.core.exactness import WidthClass
from dflash.errors import ConfigError, MissingExtra
from dflash.registry import BENCH_BACKENDS, load_attribute
from dflash.types import Drafting
from tests.backends.tiny_pair import TEMPLATE, save_draft, save_target

THINKING = TEMPLATE.replace("<|assistant|>{% endif", "<|assistant|>{% if enable_thinking %}<t>{% endif %}{% endif")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return save_target(folder / "target", template=THINKING), save_draft(folder / "draft")


@pytest.fixture(scope="module", params=["torch", "mlx"])
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "mlx":
        pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
    return str(request.param)


@pytest.fixture(scope="module")
def backend(name: str, folders: tuple[Path, Path]) -> Iterator[OwnBackend]:
    opened = open_backend(name, options(name, *folders))
    yield opened
    opened.close()


def open_backend(name: str, options: BackendOptions) -> OwnBackend:
    opened: OwnBackend = load_attribute(BENCH_BACKENDS[name])(options, lambda what, share: None)
    return opened


def options(name: str, target: Path, draft: Path) -> BackendOptions:
    """Drafting by cost on both backends, so that all forms are there."""
    machine = {"device": "cpu", "threads": 1} if name == "torch" else {}
    return BackendOptions(
        target=str(target),
        draft=str(draft),
        dtype="float32",
        drafting=Drafting(),
        **machine,  # type: ignore[arg-type]
    )


def request(text: str = "Hello", **sampling: object) -> Request:
    values = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
    return Request(messages=({"role": "user", "content": text},), sampling=Sampling(**values))  # type: ignore[arg-type]


def test_forms_give_one_text(backend: OwnBackend) -> None:
    """Guards against forms that run different weights or prompts, and against a reference that is no plain form."""
    plain = [form.name for form in backend.forms if form.kind == "plain"]
    drafted = [form for form in backend.forms if form.kind == "speculative"]
    assert [(form.name, form.reference) for form in drafted] == [("dflash", plain[-1]), ("dflash-fixed", plain[-1])]
    answers = {form.name: backend.generate(request(), form.name) for form in backend.forms}
    assert len({answer.token_ids for answer in answers.values()}) == 1
    assert answers["dflash"].num_tokens == 24


def test_a_draft_is_used_in_the_speculative_form_only(backend: OwnBackend) -> None:
    """Guards against a speed-up of plain decoding over itself."""
    plain, drafted = (backend.generate(request(), form).rounds for form in ("plain", "dflash-fixed"))
    assert plain is not None and drafted is not None
    assert plain.num_proposed == 0
    assert drafted.num_proposed


@pytest.mark.parametrize(
    ("holds", "names"),
    [(True, ["plain", "plain-exact", "dflash", "dflash-fixed"]), (False, ["plain", "dflash", "dflash-fixed"])],
)
def test_both_plain_forms_are_measured_where_there_are_two(
    backend: OwnBackend, holds: bool, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against dividing by the slower plain form: which one that is depends on the machine."""
    exactness = WidthClass(holds, 1, (1, 8), "said by the test")
    monkeypatch.setattr(backend._engine, "info", replace(backend._engine.info, exactness=exactness))
    assert [form.name for form in backend.forms] == names
    assert backend.forms[-1].reference == names[-3]


def test_figures_agree(backend: OwnBackend) -> None:
    """Guards against times and counts that do not belong together, and against a time split of work that the host did
    not wait for."""
    answer = backend.generate(request(), "dflash")
    rounds = answer.rounds
    assert rounds is not None and rounds.lengths is not None
    told = [rounds.draft_seconds, rounds.verify_seconds, rounds.other_seconds]
    assert told.count(None) == (0 if backend.info().device == "cpu" else 3)
    assert sum(rounds.lengths.values()) == rounds.num_rounds
    assert sum(length * count for length, count in rounds.lengths.items()) == rounds.num_tokens == 23
    assert answer.first_token_seconds is not None and answer.decode_seconds is not None
    assert 0 < answer.first_token_seconds < answer.total_seconds
    assert answer.first_token_seconds + answer.decode_seconds <= answer.total_seconds
    assert backend.counters("dflash") is None


def test_info_names_the_weights(backend: OwnBackend, name: str, folders: tuple[Path, Path]) -> None:
    """Guards against a record from which nobody can tell which weights ran."""
    info = backend.info()
    assert info.target is not None and info.draft is not None
    assert info.target.sha256 == file_sha256(folders[0] / "model.safetensors")
    assert info.draft.sha256 == file_sha256(folders[1] / "model.safetensors")
    machine = ("cpu", 1) if name == "torch" else ("mlx cpu", None)
    assert (info.block_size, info.dtype, info.device, info.num_threads) == (8, "float32", *machine)


def test_peak_memory_is_of_now(backend: OwnBackend, name: str, folders: tuple[Path, Path]) -> None:
    """Guards against a peak in the wrong unit: a process with PyTorch needs more than 50 MB and less than 100 GB;
    MLX's allocator holds the weights, and a request needs more."""
    backend.start_memory()
    before = backend.peak_memory_bytes()
    backend.generate(request(), "dflash")
    peak = backend.peak_memory_bytes()
    assert before is not None and peak is not None
    if name == "torch":
        assert 50e6 < before <= peak < 100e9
    else:
        weights = sum((folder / "model.safetensors").stat().st_size for folder in folders)
        assert 0.9 * weights < peak < 100e6
        assert before < peak


def test_thinking_reaches_the_template(backend: OwnBackend) -> None:
    """Guards against --thinking being accepted and ignored."""
    on, off = (backend.generate(request(thinking=value), "plain").num_prompt_tokens for value in (True, False))
    assert on is not None and off is not None
    assert on == off + len("<t>")


def test_thinking_without_a_switch_is_refused(name: str, folders: tuple[Path, Path]) -> None:
    """Guards against two runs that differ in name only."""
    opened = open_backend(name, options(name, *folders))
    opened._engine.tokenizer.chat_template = TEMPLATE
    with pytest.raises(ConfigError, match="no switch for thinking"):
        opened.generate(request(thinking=True), "plain")
    opened.close()


def test_a_prompt_too_long_is_one_failed_request(backend: OwnBackend) -> None:
    """Guards against a run that one long prompt ends."""
    with pytest.raises(RequestFailed) as caught:
        backend.generate(request("x" * 5000), "dflash")
    assert caught.value.kind == "prompt"


def test_cancelling_frees_the_request(backend: OwnBackend) -> None:
    """Guards against a cancelled request that counts as done, and against state that stays behind it."""
    before = backend.generate(request(), "dflash").token_ids
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(Cancelled):
        backend.generate(replace(request(), cancelled=given_up), "dflash")
    assert backend.generate(request(), "dflash").token_ids == before


def test_seeds_change_the_text_and_not_the_form(backend: OwnBackend) -> None:
    """Guards against a seed that is dropped on the way, and backs `same_seed_same_text`."""
    assert backend.same_seed_same_text
    texts = {
        seed: {backend.generate(request(temperature=1.0, seed=seed), form).token_ids for form in ("plain", "dflash")}
        for seed in (1, 2)
    }
    assert [len(found) for found in texts.values()] == [1, 1]
    assert texts[1] != texts[2]


def test_options_without_effect_are_refused(name: str, folders: tuple[Path, Path]) -> None:
    """Guards against options that are accepted and have no effect."""
    changes: list[dict[str, object]] = [{"url": "http://localhost:1"}, {"model": "m"}, {"stream": False}]
    for change in [*changes, {"tokenizer": "t"}, *([{"threads": 2}] if name == "mlx" else [])]:
        with pytest.raises(ConfigError, match=f"no effect on --backend {name}"):
            open_backend(name, replace(options(name, *folders), **change))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"--backend {name} needs a target"):
        open_backend(name, BackendOptions())


def test_without_mlx_the_cure_is_named(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback of `dflash bench --backend mlx` where MLX is not installed."""
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.delitem(sys.modules, "dflash.backends.mlx.engine", raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'dflash\[mlx\]'"):
        open_backend("mlx", options("mlx", *folders))
