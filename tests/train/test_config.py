"""The training recipe: one file, overrides, and an error for everything that would be ignored or crash later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dflash.errors import ConfigError
from dflash.train.config import TrainConfig, load_config
from dflash.train.export import write_recipe
from dflash.train.recipe_errors import keys
from dflash.train.trainer import fingerprint

MINIMAL = "target: t\nout: runs/x\ndata:\n  answers: [answers]\n"


def write(folder: Path, text: str = MINIMAL) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def test_every_field_is_described() -> None:
    """Guards against a key that docs/training.md lists without saying what it does."""
    silent = [name for name, field in fields(TrainConfig) if not field.description or len(field.description) < 15]
    assert not silent


def test_the_smallest_recipe(tmp_path: Path) -> None:
    """Guards against more required keys than target, out and answers."""
    config = load_config(write(tmp_path))
    assert config.data.answers == [Path("answers")]
    assert config.optimizer.sequences_per_step >= 1


def test_overrides(tmp_path: Path) -> None:
    """Guards against an override that is parsed as text, lands in another section or is dropped."""
    overrides = [
        "optimizer.learning_rate=3e-4",
        "steps=7",
        "data.answers=[a, b/c]",
        "network.target_layer_ids=[1, 5]",
        "init=folder=with=signs",
        "optimizer.betas=[0.5, 0.6]",
        "dtype=bfloat16",
        "max_minutes=null",
    ]
    config = load_config(write(tmp_path), overrides)
    assert config.optimizer.learning_rate == 3e-4
    assert config.steps == 7
    assert config.data.answers == [Path("a"), Path("b/c")]
    assert config.network.target_layer_ids == [1, 5]
    assert config.init == "folder=with=signs"
    assert config.optimizer.betas == (0.5, 0.6)
    assert config.dtype == "bfloat16"
    assert config.max_minutes is None
    assert load_config(write(tmp_path), ["steps=7", "steps=8"]).steps == 8


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stepz=1", "stepz"),
        ("optimizer.lr=1", r"optimizer\.lr"),
        ("data.features.kind=1", "data"),
        ("steps", "section.key=value"),
        ("=1", "section.key=value"),
        ("target.name=1", "target is not a section"),
        ("steps=[1", "not valid YAML"),
        ("steps=0", "steps"),
        ("steps=many", "steps"),
        ("steps=1.5", "steps"),
        ("network.block_size=1", "block_size"),
        ("network.start=magic", "start"),
        ("data.limit=0", "limit"),
        ("data.held_out=0", "held_out"),
        ("data.split_seed=-1", "split_seed"),
        ("seed=-1", "seed"),
        ("optimizer.betas=[0.9, 1.0]", "betas"),
        ("optimizer.learning_rate=.inf", "learning_rate"),
        ("optimizer.learning_rate=-1", "learning_rate"),
        ("loss.gamma=0", "gamma"),
        ("loss.distill=1.5", "distill"),
        ("dtype=float16", "dtype"),
        ("data.answers=", "answers"),
        ("optimizer.micro_batch=5", r"optimizer: micro_batch 5 has no effect beyond sequences_per_step 4; lower it"),
        ("optimizer.micro_batch=0", "micro_batch"),
    ],
)
def test_bad_overrides(tmp_path: Path, override: str, words: str) -> None:
    """Guards against typing errors that train for hours with a default."""
    with pytest.raises(ConfigError, match=words):
        load_config(write(tmp_path), [override])


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("stepz=1", "stepz: there is no such key; did you mean steps?"),
        (
            "optimizer.learning_rat=1",
            "optimizer.learning_rat: there is no such key; did you mean optimizer.learning_rate?",
        ),
        ("learning_rate=1", "learning_rate: there is no such key; did you mean optimizer.learning_rate?"),
        ("network.steps=1", "network.steps: there is no such key; did you mean steps?"),
        ("loss.zzz=1", "loss.zzz: there is no such key (there are gamma, distill)"),
        ("steps=0", "steps must be at least 1, not 0"),
        ("steps=many", "steps must be a whole number, not 'many'"),
        ("steps=1.5", "steps must be a whole number, not 1.5"),
        ("max_minutes=0", "max_minutes must be above 0, not 0"),
        ("loss.distill=1.5", "loss.distill must be at most 1, not 1.5"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas[1] must be below 1, not 1.0"),
        ("optimizer.betas=[0.9]", "optimizer.betas has too few entries: [0.9]"),
        ("optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas must have 2 entries, not 3"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate must be a finite number, not inf"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate must be a number, not 'fast'"),
        ("network.start=magic", "network.start must be 'target', 'routed' or 'random', not 'magic'"),
        ("data.answers=a", "data.answers must be a list, not 'a'"),
        ("data.answers=", "data.answers must be a list, not empty"),
        ("data.answers=[1]", "data.answers[0] must be a path, not 1"),
        ("network=5", "network must be a section of keys, not 5"),
        ("target=5", "target must be a text, not 5"),
        ("out=", "out must be a path, not empty"),
        ("network.target_layer_ids=[1, a]", "network.target_layer_ids[1] must be a whole number, not 'a'"),
    ],
)
def test_faults_in_the_words_of_the_recipe(tmp_path: Path, override: str, sentence: str) -> None:
    """Guards against the validator's own words ("Input should be a valid dictionary or instance of NetworkConfig"): a
    fault is named by its key, with what was given and what is allowed."""
    with pytest.raises(ConfigError) as found:
        load_config(write(tmp_path), [override])
    assert str(found.value) == f"recipe {tmp_path / 'recipe.yaml'}: {sentence}."


def test_every_kind_of_fault_is_in_our_words(tmp_path: Path) -> None:
    """Guards against a new key whose faults come in the validator's words: each key is given a value of every kind."""
    path, refused = write(tmp_path), 0
    wrong = ["{a: 1}", "[[1]]", "-1e300", ".nan", "zzz", "true", "", "10000000000000000000000000000000"]
    spoken = ("Input", "valid", "Value error", "Field", "Extra", "Tuple", "validation")
    for key in keys(TrainConfig):
        for value in wrong:
            try:
                load_config(path, [f"{key}={value}"])
            except ConfigError as error:
                refused += 1
                text = str(error).removeprefix(f"recipe {path}: ")
                assert text.startswith(key.partition(".")[0])
                assert not [word for word in spoken if word in text], text
    assert refused > 200


def test_all_faults_at_once(tmp_path: Path) -> None:
    """Guards against mending a recipe fault by fault, and against a required key whose meaning has to be looked up."""
    with pytest.raises(ConfigError) as found:
        load_config(write(tmp_path, "out: o\nsteps: 0\ndata:\n  limit: x\n3: 4\n"))
    assert str(found.value) == (
        f"recipe {tmp_path / 'recipe.yaml'}: target is required (Target: hub id, folder, GGUF file or built-in name); "
        "data.answers is required (Files or folders of answers made by `dflash prepare`); "
        "data.limit must be a whole number, not 'x'; steps must be at least 1, not 0; 3 must be a key that is a text, "
        "not 3."
    )
    with pytest.raises(ConfigError, match=r"data is required \(What is learnt from\)"):
        load_config(write(tmp_path, "target: t\nout: o\n"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "mapping"),
        ("- a", "mapping"),
        ("a: [", "not valid YAML"),
        ("target: t\nout: o\n", "data"),
        (MINIMAL + "extra: 1\n", "extra"),
        (MINIMAL + "network:\n  layers: 3\n", "layers"),
    ],
)
def test_bad_recipes(tmp_path: Path, text: str, words: str) -> None:
    """Guards against a recipe that is half read; the message is one line and names the file."""
    with pytest.raises(ConfigError, match=words) as found:
        load_config(write(tmp_path, text))
    assert "\n" not in str(found.value)
    assert "recipe.yaml" in str(found.value)


@pytest.mark.parametrize(("per_step", "micro"), [(1, 1), (4, 4), (4, 3), (8, 1)])
def test_micro_batches_up_to_the_whole_step(tmp_path: Path, per_step: int, micro: int) -> None:
    """Guards against a limit that is off by one, or refuses what does not divide evenly."""
    overrides = [f"optimizer.sequences_per_step={per_step}", f"optimizer.micro_batch={micro}"]
    assert load_config(write(tmp_path), overrides).optimizer.micro_batch == micro
    with pytest.raises(ConfigError, match="micro_batch"):
        load_config(write(tmp_path), [overrides[0], f"optimizer.micro_batch={per_step + 1}"])


def test_unreadable_recipes(tmp_path: Path) -> None:
    """Guards against a traceback for a mistyped path, a folder or a binary file."""
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "binary.yaml"):
        with pytest.raises(ConfigError, match=path.name):
            load_config(path)


def test_the_resolved_recipe_reads_back(tmp_path: Path) -> None:
    """Guards against a stored recipe that cannot repeat the run."""
    config = load_config(write(tmp_path), ["optimizer.betas=[0.8, 0.9]", "network.target_layer_ids=[0, 2]"])
    write_recipe(tmp_path / "resolved.yaml", config)
    assert load_config(tmp_path / "resolved.yaml") == config
    assert set(yaml.safe_load((tmp_path / "resolved.yaml").read_text())) == set(TrainConfig.model_fields)


def test_a_published_recipe_hides_folders(tmp_path: Path) -> None:
    """Guards against a draft that tells where its maker keeps files; hub ids and relative paths stay whole."""
    config = load_config(write(tmp_path), [f"data.answers=[{tmp_path}/mine, runs/other]", "target=owner/name"])
    write_recipe(tmp_path / "public.yaml", config, portable=True)
    stored = yaml.safe_load((tmp_path / "public.yaml").read_text())
    assert stored["data"]["answers"] == ["mine", "runs/other"]
    assert stored["target"] == "owner/name"


def test_fingerprint(tmp_path: Path) -> None:
    """Guards against resuming under another recipe, against refusing harmless changes, and against a new version that
    can no longer resume running trainings: the value of this recipe may never change."""
    path = write(tmp_path)
    base = fingerprint(load_config(path))
    harmless = ["out=elsewhere", "dtype=bfloat16", "log_every=3", "checkpoint_every=5", "max_minutes=1", "device=cpu"]
    harmless += ["data.bigrams=false"]
    assert fingerprint(load_config(path, harmless)) == base
    for override in ("steps=9", "optimizer.learning_rate=1", "seed=4", "data.limit=7", "loss.distill=0.5"):
        assert fingerprint(load_config(path, [override])) != base
    assert base == FINGERPRINT, json.dumps(json.loads(load_config(path).model_dump_json()))


FINGERPRINT = "cc00f3b36a3c3e3a"
"""Of MINIMAL. A field that is added later has to stay out of the fingerprint while it has its default."""
