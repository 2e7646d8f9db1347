"""From a folder in some layout to a text: every dialect opens with its target and decodes losslessly.

One random network per kind, written in the layouts that have it, must propose the same whatever it is read from.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash import load
from dflash.backends.torch.draft_model import DraftModel
from dflash.core.draft_config import CONFIG_FILE, WEIGHTS_FILE
from dflash.core.draft_reader import dialect_named, read_draft
from dflash.types import Drafting, SamplingParams
from tests.backends.tiny_pair import draft_config, save_target

SPARK: dict[str, Any] = {"markov_rank": 6, "markov_head": "gated", "anchor_predicts": True, "confidence_head": True}
HEADS = {"markov_rank": 6, "markov_head_type": "gated", "enable_confidence_head": True}
Folder = tuple[dict[str, Any], Mapping[str, str]]
"""A config.json and the tensor names that differ."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "t")


def network(**changes: Any) -> DraftModel:
    draft = DraftModel(draft_config(**changes)).requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for parameter in draft.parameters():
        if parameter.ndim > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return draft


def plain_config(draft: DraftModel, **changes: Any) -> dict[str, Any]:
    """Flat keys as all trainers but Speculators write them."""
    plain = dataclasses.replace(
        draft.config, markov_rank=0, markov_head="", confidence_head=False, anchor_predicts=False
    )
    raw = plain.to_json()
    nested: dict[str, Any] = raw.pop("dflash_config")
    return raw | nested | changes


def written(name: str, draft: DraftModel) -> Folder:
    write = dialect_named(name).write
    assert write is not None
    return write(draft.config), {}


def layouts(kind: str, draft: DraftModel) -> dict[str, Folder]:
    """The same draft in every layout that has its kind."""
    if kind == "dflash":
        names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
        return {
            "z-lab": written("z-lab", draft),
            "flat": (plain_config(draft), {}),
            "speculators": written("speculators", draft),
            "transformers": (written("transformers", draft)[0], names),
        }
    ids = {key: plain_config(draft)[key] for key in ("mask_token_id", "target_layer_ids")}
    bare = {key: value for key, value in plain_config(draft).items() if key not in (*ids, "architectures")}
    unprefixed = {name: name.removeprefix("markov_head.") for name in draft.state_dict() if "markov_head" in name}
    unprefixed |= {f"confidence_head.proj.{part}": f"confidence_proj.{part}" for part in ("weight", "bias")}
    nested = ids | {"projector_type": "dspark"}
    return {
        "deepspec": (plain_config(draft, architectures=["Qwen3DSparkModel"], **HEADS), {}),
        "specforge": (bare | {"dflash_config": nested | HEADS}, {}),
        "modelopt": (bare | {"dflash_config": nested | {"use_confidence_head": True, "shift_label": True}}, unprefixed),
        "lfm2": (bare | {"dflash_config": ids, "architectures": ["Lfm2DSparkDraftModel"]}, {}),
        "speculators": written("speculators", draft),
    }


def saved(folder: Path, draft: DraftModel, layout: Folder) -> Path:
    raw, names = layout
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(json.dumps(raw))
    held = {names.get(name, name): value.contiguous() for name, value in draft.state_dict().items()}
    save_file(held, folder / WEIGHTS_FILE)
    return folder


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_all_layouts_of_a_draft_are_one_draft(kind: str, target: Path, tmp_path: Path) -> None:
    """Guards against a layout that loads and drafts otherwise: the plain text in all, and the same proposals."""
    draft = network(**(SPARK if kind == "dspark" else {}))
    proposals = set()
    for name, layout in layouts(kind, draft).items():
        folder = saved(tmp_path / name, draft, layout)
        assert read_draft(folder).config == draft.config, name
        engine = load(target, folder, dtype="float32", device="cpu", num_threads=1, exact=False)
        assert engine.drafter is not None
        request = SamplingParams(max_new_tokens=16, ignore_eos=True)
        text = engine.generate(prompt_ids=[5, 6, 7], params=request, drafting=Drafting(fixed=True))
        plain = engine.generate(prompt_ids=[5, 6, 7], params=request, use_draft=False)
        assert text.token_ids == plain.token_ids, name
        assert text.stats.num_proposed > 0
        session = engine.drafter.session()
        session.observe(range(9), torch.randn(9, 64, generator=torch.Generator().manual_seed(0)))
        proposals.add((session.propose(3, 99), session.propose(200, 99)))
        engine.close()
    assert len(proposals) == 1
