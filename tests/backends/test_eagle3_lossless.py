"""Decoding with EAGLE-3 drafts is lossless: any weights, both layouts, chains and trees, greedy and sampled."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from dflash import Drafting
from dflash.backends.torch.drafters.eagle3 import Eagle3Drafter
from dflash.backends.torch.sampling import TorchAcceptor
from dflash.backends.torch.target import TorchTarget
from dflash.check.run import check
from dflash.core.cost import CostCurve, CostTracker
from dflash.core.draft_reader import read_draft
from dflash.core.drafting import make_session
from dflash.core.engine import Engine
from dflash.core.loop import speculative_rounds
from dflash.core.memory import Memory
from dflash.core.stopping import StopRule
from dflash.errors import ConfigError, PairError, UnsupportedModel
from dflash.prepare.prompts import Conversation
from dflash.types import Round, SamplingParams
from tests.backends.eagle3_drafts import (
    TAPS,
    eagle3_config,
    random_eagle3,
    safeailab,
    save_eagle3,
    speculators,
    train_eagle3,
)
from tests.backends.pairs import GREEDY, PROMPTS, SAMPLED, OpenEngine, load_with_taps
from tests.backends.pairs import open_engine as open_torch_engine
from tests.backends.tiny_pair import save_target
from tests.backends.tiny_targets import VOCAB_SIZE, llama, qwen3, tokens
from tests.cli.test_documents import blocks

FREE_ROWS = CostCurve((1, 64), (0,), ((1.0, 1.0),))
REDUCED = tuple(range(1, VOCAB_SIZE, 2))
SHORT = dataclasses.replace(SAMPLED, max_new_tokens=24)
CHECKED: dict[str, Any] = {"max_new_tokens": 40, "dtype": "float32", "device": "cpu", "num_threads": 1} | {
    "prompts": [Conversation(id=str(n), turns=(text,), source="", context=()) for n, text in enumerate(PROMPTS[:1])]
}
MODES = [
    Drafting(fixed=True),
    Drafting(mode="exact", copies=False, steady=True),
    Drafting(mode="fast", copies=False, draws=False, steady=True),
]
TARGETS: dict[str, Callable[[], PreTrainedModel]] = {"llama": llama, "qwen3": qwen3}


def drafter_for(target: TorchTarget, weights: str) -> Eagle3Drafter:
    """Random: right by luck. Adversarial: says with certainty what the target says least. Trained is tested below."""
    config = eagle3_config(
        hidden_size=target.hidden_size,
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=len(REDUCED) if weights == "reduced" else None,
        owns_head=weights != "adversarial",
    )
    network = random_eagle3(config, ids=REDUCED if weights == "reduced" else None)
    drafter = Eagle3Drafter(network, target)
    if weights == "adversarial":
        drafter.score = lambda hidden: -50 * hidden @ drafter.head_KH.T
    return drafter


def rounds_of(target: TorchTarget, drafter: Eagle3Drafter | None, params: SamplingParams, how: Drafting) -> list[Round]:
    session = target.session()
    memory = Memory(CostTracker(FREE_ROWS))
    drafting = None if drafter is None else make_session(drafter, how, memory, max_rows=16, supports_trees=True)
    prompt = tokens(11)
    acceptor = TorchAcceptor(params, prompt, target.vocab_size, target.device)
    found = list(
        speculative_rounds(session, drafting, acceptor, StopRule(), prompt, max_new_tokens=params.max_new_tokens)
    )
    session.close()
    return found


def text_of(rounds: list[Round]) -> list[int]:
    return [token for step in rounds for token in step.tokens]


@pytest.mark.parametrize("weights", ["random", "reduced", "adversarial"])
@pytest.mark.parametrize("family", TARGETS)
def test_any_weights_on_any_target(family: str, weights: str) -> None:
    """Fault: a guess that changes the text; float32, every mode, greedy and sampled with the same seed."""
    target = TorchTarget(TARGETS[family](), taps=TAPS)
    drafter = drafter_for(target, weights)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_new_tokens=14, temperature=temperature, seed=5, ignore_eos=True)
        plain = text_of(rounds_of(target, None, params, Drafting()))
        for how in MODES:
            found = rounds_of(target, drafter, params, how)
            assert text_of(found) == plain, how
            assert any(step.num_proposed for step in found), "nothing was drafted, so nothing was tested"
    target.close()


@pytest.fixture(scope="module")
def layouts(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One draft that has learnt this target's answers, in both layouts. Its taps are listed in either numbering."""
    engine = open_torch_engine(target_folder, None)
    network = random_eagle3(eagle3_config())
    pairs = [(engine.tokenize(prompt), engine.generate(prompt, GREEDY).token_ids) for prompt in PROMPTS[:1]]
    engine.close()
    tapped = load_with_taps(target_folder, TAPS)
    train_eagle3(network, tapped.target, pairs)
    tapped.close()
    place = tmp_path_factory.mktemp("eagle3")
    listed = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS)}}
    return {
        "safeailab": save_eagle3(place / "a", network, safeailab(network.config, **listed), midlayer=True),
        "speculators": save_eagle3(place / "b", network, speculators(network.config)),
    }


@pytest.fixture(scope="module")
def engines(open_engine: OpenEngine, target_folder: Path, layouts: dict[str, Path]) -> dict[str, Engine]:
    """On each backend in turn."""
    return {name: open_engine(target_folder, folder) for name, folder in layouts.items()}


@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_a_trained_draft_in_both_layouts(layout: str, engines: dict[str, Engine]) -> None:
    """Fault: taps, halves of the input or rows shifted on the way from a file: then what was learnt is not found again.
    Plain text in every mode all the same."""
    engine = engines[layout]
    assert engine.target.taps == TAPS
    for prompt, params in ((PROMPTS[0], GREEDY), (PROMPTS[1], SHORT)):
        plain = engine.generate(prompt, params, use_draft=False)
        for how in MODES if layout == "speculators" else MODES[:1]:
            engine.memory = Memory(CostTracker(FREE_ROWS))
            drafted = engine.generate(prompt, params, drafting=how)
            assert drafted.token_ids == plain.token_ids, how
            if params is GREEDY and how.fixed:
                assert drafted.stats.acceptance_length > 1.8


def test_both_layouts_draft_alike(engines: dict[str, Engine]) -> None:
    """Fault: a layout that is read as another network."""
    found = [
        engines[name].generate(PROMPTS[0], GREEDY, drafting=Drafting(fixed=True)).stats for name in sorted(engines)
    ]
    assert found[0].num_accepted == found[1].num_accepted > 0


def test_trees_are_fed(engines: dict[str, Engine]) -> None:
    """Fault: mode "fast" feeds chains only."""
    engine = engines["speculators"]
    engine.memory = Memory(CostTracker(FREE_ROWS))
    stats = engine.generate(PROMPTS[2], SHORT, drafting=Drafting(mode="fast", copies=False, steady=True)).stats
    assert max(stats.rows) > engine.drafter.session().max_proposal + 1  # type: ignore[union-attr]


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_check_describes_and_judges(backend: str, target_folder: Path, layouts: dict[str, Path]) -> None:
    """Fault: a draft whose taps are one layer off passes, or a good one is called misread. SafeAILab's list of outputs
    copied to the top level, where ids mean inputs, is that mistake."""
    options = dict(CHECKED)
    if backend == "mlx":
        pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
        options |= {"num_threads": None}
    report = check(str(target_folder), str(layouts["safeailab"]), backend=backend, **options)
    rows = {row.name: row for row in report.rows}
    assert report.usable, report.findings
    assert rows["taps"].value.startswith("0, 1, 2: outputs")
    assert rows["taps"].origin == "eagle_config, eagle_aux_hidden_state_layer_ids (outputs of layers)"
    assert rows["taps elsewhere"].value.startswith("1, 2, 3 where layers are named by what enters")
    assert rows["chain"].value == "at most 7 draft tokens, one step of the draft each"
    assert {"fusion", "residual", "fed back", "rope"} <= rows.keys()
    assert "mask id" not in rows
    assert "260 of 260" in rows["vocabulary"].value


def test_check_finds_taps_one_layer_off(target_folder: Path, tmp_path: Path) -> None:
    """Fault: ids that mean outputs are read as inputs, and nothing shows but speed."""
    taps = (1,)
    engine = open_torch_engine(target_folder, None)
    network = random_eagle3(eagle3_config(target_layer_ids=taps))
    pairs = [(engine.tokenize(prompt), engine.generate(prompt, GREEDY).token_ids) for prompt in PROMPTS[:1]]
    engine.close()
    tapped = load_with_taps(target_folder, taps)
    train_eagle3(network, tapped.target, pairs, steps=80)
    tapped.close()
    shifted = speculators(network.config, eagle_aux_hidden_state_layer_ids=list(taps))
    folder = save_eagle3(tmp_path / "draft", network, shifted)
    report = check(str(target_folder), str(folder), **CHECKED)
    assert not report.usable
    assert any("one layer later" in finding.message for finding in report.findings)


def test_taps_follow_from_the_targets_depth(open_engine: OpenEngine, tmp_path: Path) -> None:
    """Fault: a checkpoint that lists no taps, as SafeAILab's do not, is refused or tapped elsewhere."""
    target = save_target(tmp_path / "deep", num_hidden_layers=8)
    config = dataclasses.replace(eagle3_config(), target_layer_ids=())
    folder = save_eagle3(tmp_path / "draft", random_eagle3(config), safeailab(config), midlayer=True)
    engine = open_engine(target, folder)
    assert engine.target.taps == (1, 3, 4)
    params = dataclasses.replace(GREEDY, max_new_tokens=12)
    plain = engine.generate(PROMPTS[1], params, use_draft=False)
    assert engine.generate(PROMPTS[1], params, drafting=Drafting(fixed=True)).token_ids == plain.token_ids
    engine.close()
    with pytest.raises(PairError, match="no three layers of a target of 3"):
        open_engine(save_target(tmp_path / "shallow"), folder)


def test_misfits_are_refused(target_folder: Path, layouts: dict[str, Path], tmp_path: Path) -> None:
    """Fault: a draft of another width or vocabulary, or a use that needs a block, ends in a traceback."""
    from dflash.backends.torch.convert import convert_draft
    from dflash.backends.torch.draft_loading import load_draft

    other = eagle3_config(vocab_size=200)
    folder = save_eagle3(tmp_path / "other", random_eagle3(other), speculators(other))
    with pytest.raises(PairError, match="vocabulary size 200"):
        open_torch_engine(target_folder, folder)
    with pytest.raises(UnsupportedModel, match="cannot be written in a layout of block drafts"):
        convert_draft(layouts["speculators"], tmp_path / "out", "z-lab")
    with pytest.raises(UnsupportedModel, match="has no block"):
        load_draft(layouts["speculators"], torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError, match="width 40"):
        open_torch_engine(target_folder, layouts["speculators"], width=40)


def test_a_draft_window(engines: dict[str, Engine]) -> None:
    """Fault: a window that is accepted and changes the text."""
    engine = engines["speculators"]
    plain = engine.generate(PROMPTS[0], SHORT, use_draft=False)
    found = engine.generate(PROMPTS[0], SHORT, drafting=Drafting(fixed=True, draft_window=4))
    assert found.token_ids == plain.token_ids


def test_pickled_weights_are_converted_as_the_page_says(
    layouts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the page's lines do not run, or what they write is another draft. SafeAILab's files are pickled."""
    shutil.copytree(layouts["safeailab"], tmp_path / "draft")
    weights = tmp_path / "draft" / "model.safetensors"
    expected = load_file(weights)
    torch.save(expected, tmp_path / "draft" / "pytorch_model.bin")
    weights.unlink()
    (lines,) = blocks(Path(__file__).parents[2] / "docs" / "drafts.md", "python")
    monkeypatch.chdir(tmp_path / "draft")
    exec(lines, {})
    assert read_draft(tmp_path / "draft").config == read_draft(layouts["safeailab"]).config
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(weights).items())
