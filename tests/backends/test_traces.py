"""Recording traces on every backend: a replay makes the rounds that the engine itself makes."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from dflash import Drafting, SamplingParams
from dflash.bench.replay import Costs, replay
from dflash.bench.traces import read_traces, record
from dflash.core.engine import Engine
from dflash.errors import ConfigError
from tests.backends.pairs import GREEDY, PROMPTS, OpenEngine

SCRIPT = Path(__file__).parents[2] / "scripts" / "replay_rounds.py"
COSTS = Costs.through({1: 1.0, 16: 1.6}, 0.2)
FILTERED = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=0.7, top_k=30, seed=5)


@pytest.fixture(scope="module")
def trained(open_engine: OpenEngine, target_folder: Path, trained_folder: Path) -> Engine:
    return open_engine(target_folder, trained_folder)


@pytest.mark.parametrize("params", [GREEDY, FILTERED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafting", [Drafting(fixed=True), Drafting(mode="exact", steady=True)], ids=["fixed", "cost"])
def test_a_replay_makes_the_rounds_of_the_engine(trained: Engine, drafting: Drafting, params: SamplingParams) -> None:
    """Fault: tables of other anchors or features than decoding would see, probabilities of another position, a rule
    that is not the engine's. The trained draft is right now and then at T > 0 and mostly so at T = 0."""
    ids = trained.tokenize(PROMPTS[0])
    trace = record(trained, "set/0", ids, params)
    trained.memory = COSTS.memory()
    real = trained.generate(prompt_ids=ids, params=params, drafting=drafting)
    assert tuple(real.token_ids) == trace.answer_ids
    found = replay(trace, COSTS, drafting, max_rows=trained.max_rows).stats
    assert found.acceptance_lengths == real.stats.acceptance_lengths
    assert found.rows == real.stats.rows
    assert found.reasons == real.stats.reasons
    assert found.num_accepted == real.stats.num_accepted > 0


def test_a_known_answer_is_not_decoded_again(trained: Engine) -> None:
    """Fault: `answer` is ignored, or cut."""
    ids = trained.tokenize(PROMPTS[1])
    trace = record(trained, "set/1", ids, GREEDY, answer=[5, 6, 7, 8])
    assert (trace.answer_ids, len(trace.tables), trace.stopped) == ((5, 6, 7, 8), 3, True)


def test_copies_alone_are_no_draft(open_engine: OpenEngine, target_folder: Path) -> None:
    """Fault: an engine without a draft gives an empty trace."""
    engine = open_engine(target_folder, "ngram")
    with pytest.raises(ConfigError, match="no draft to record"):
        record(engine, "set/0", [1, 2], GREEDY)


def test_the_tool_records_what_replay_reads(
    target_folder: Path, trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the command of the page does not run, or leaves out other prompts than it was told to."""
    prompts, traces = tmp_path / "set.jsonl", tmp_path / "traces.gz"
    prompts.write_text("".join(json.dumps({"id": str(n), "prompt": text}) + "\n" for n, text in enumerate(PROMPTS)))
    pair = ["--target", str(target_folder), "--draft", str(trained_folder), "--threads", "1", "--dtype", "float32"]
    arguments = ["record", str(traces), str(prompts), "--skip", "1", "--limit", "2", "-n", "8", *pair]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    found = list(read_traces(traces))
    assert [trace.name for trace in found] == ["set/1", "set/2"]
    assert all(1 < len(trace.answer_ids) <= 8 and len(trace.tables) == len(trace.answer_ids) - 1 for trace in found)
