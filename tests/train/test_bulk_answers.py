"""`scripts/bulk_answers.py`: slots that are refilled give each prompt the answer it has alone."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflash.prepare.answers import read_answers

SCRIPT = Path(__file__).parents[2] / "scripts" / "bulk_answers.py"
STOPS = [3, 7, 11, 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with grouped heads, whose answers end at different lengths."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=23, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=STOPS, initializer_range=0.4,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = STOPS
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("slots", [1, 3, 40])
def test_equal_to_one_at_a_time(
    folder: Path, tmp_path: Path, slots: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against keys of a slot's earlier sequence, a wrong position after a refill, a lost or doubled prompt."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, 23, (length,), generator=generator).tolist() for length in (5, 2, 9, 3, 120, 4, 1)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(ids) + "\n" for ids in prompts))
    arguments = [folder, tmp_path / "prompts.jsonl", tmp_path / "out", "--slots", slots, "--max-new-tokens", 40]
    monkeypatch.setattr(sys, "argv", ["bulk_answers.py", *map(str, arguments), "--device", "cpu"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert f"{len(prompts)} answers" in capsys.readouterr().out
    found = {tuple(row.prompt_ids): list(row.answer_ids) for row in read_answers(tmp_path / "out", vocab_size=23)}
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lengths = set()
    for ids in prompts:
        alone = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0, len(ids) :].tolist()
        assert found[tuple(ids)] == alone
        lengths.add(len(alone))
    assert len(lengths) > 1, "all answers have one length: refilling was not exercised"
