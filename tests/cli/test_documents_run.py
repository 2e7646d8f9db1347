"""The way from prompts to a draft that README, training page and recipe show, command by command, at tiny scale.

Only what makes it small is added to a command: fewer tokens and steps, a tiny random target in the place of a real one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash.backends.torch.loading import set_threads
from dflash.core.draft_reader import read_draft_config
from dflash.prepare.answers import read_manifest
from scripts.write_docs import TRAINING_PAGE
from tests.backends.tiny_pair import TEMPLATE, VOCAB, save_target
from tests.cli.fakes import CommandLine
from tests.cli.test_documents import ROOT, blocks, commands

TINY_RUN = ("dtype=float32", "device=cpu", "num_threads=1", "steps=2", "evaluate_prompts=1", "evaluate_tokens=4")
TINY_DATA = ("data.held_out=1", "data.num_anchors=4", "optimizer.warmup_steps=1")
TINY_DRAFT = ("network.target_layer_ids=[0, 2]", "network.num_key_value_heads=4", "network.intermediate_size=48")
SMALL = {
    "prepare": ("--max-new-tokens", "12", "--dtype", "float32", "--device", "cpu"),
    "train": (*TINY_RUN, *TINY_DATA),
    "bigrams": (),
    "generate": ("-n", "4", "--dtype", "float32", "--device", "cpu", "--threads", "1", "--no-exact"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in with the page's prompts and recipe and a target whose template knows system messages."""
    set_threads(1)
    save_target(tmp_path / "my-model", template=TEMPLATE.replace("('user', ", "('system', 'user', "))
    (lines,) = blocks(TRAINING_PAGE, "json")
    (tmp_path / "prompts.jsonl").write_text(lines, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown(page: Path) -> list[list[str]]:
    """The commands of the page's block that begins with preparing."""
    found = list(commands(page))
    first = next(index for index, words in enumerate(found) if words[0] == "prepare")
    return found[first : first + 3]


def execute(cli: CommandLine, words: list[str]) -> str:
    done = cli.run(*("./my-model" if word == "smollm2-135m" else word for word in words), *SMALL[words[0]])
    assert done.code == 0, (words, done.err)
    return done.out


@pytest.fixture
def real_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys, fake=False)


@pytest.mark.parametrize("page", [ROOT / "README.md", TRAINING_PAGE], ids=lambda page: page.name)
def test_from_prompts_to_a_draft(page: Path, place: Path, real_cli: CommandLine) -> None:
    """Guards against three commands that do not fit together: names of folders, forms of prompts, keys of the recipe;
    and against a page whose `--resume` goes another way."""
    (recipe,) = blocks(TRAINING_PAGE, "yaml")
    values: dict[str, Any] = yaml.safe_load(recipe)
    (place / "recipe.yaml").write_text(yaml.safe_dump(values | {"target": "./my-model"}), encoding="utf-8")
    prepare, train, generate = shown(page)
    assert [prepare[0], train[0], generate[0]] == ["prepare", "train", "generate"]
    execute(real_cli, prepare)
    manifest = read_manifest(place / "answers")
    assert manifest is not None
    assert manifest.total("num_rows") == 4  # of the page's three conversations, one of which has two turns
    execute(real_cli, train)
    resume = "dflash train recipe.yaml --resume"
    assert f"`{resume}`" in TRAINING_PAGE.read_text(encoding="utf-8")
    execute(real_cli, resume.split()[1:])
    execute(real_cli, generate)
    assert (place / "runs/first/draft/provenance.json").is_file()
    for words in commands(page):
        if words[0] == "bigrams":
            assert execute(real_cli, [*words[:-1], "runs/first/draft"]).startswith(
                "runs/first/draft/draft_bigrams.json"
            )


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_run(recipe: Path, place: Path, real_cli: CommandLine) -> None:
    """Guards against a recipe that is valid and does not run: its way of starting, its draft vocabulary, its features
    and losses, with the answers made by the command in its first lines."""
    text = recipe.read_text(encoding="utf-8")
    (place / "recipe.yaml").write_text(text, encoding="utf-8")
    (command,) = {line.split("`")[1] for line in text.split("target:")[0].splitlines() if "`dflash prepare" in line}
    execute(real_cli, command.split()[1:])
    words = ["train", "recipe.yaml", "target=./my-model", *TINY_DRAFT, f"network.draft_vocabulary_size={VOCAB // 2}"]
    execute(real_cli, words)
    config = read_draft_config(place / yaml.safe_load(text)["out"] / "draft")
    stated = yaml.safe_load(text)["network"]
    assert (config.block_size, config.num_hidden_layers) == (stated["block_size"], stated["num_layers"])
    assert config.draft_vocabulary_file is not None
