"""Draft folders made to harm: each is refused with one clear line, runs no code, and takes no memory to speak of.

A folder comes from anywhere. Its claims (lengths, shapes, names, links) are checked against its files before anything
is reserved or opened; the whole kind is one table, so that a new trick is one line.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.backends.torch.draft_loading import load_draft
from dflash.backends.torch.loading import open_target
from dflash.cli.errors import reported
from dflash.core.draft_config import CONFIG_FILE, WEIGHTS_FILE
from dflash.core.safetensors_files import INDEX_FILE
from dflash.errors import DFlashError
from dflash.resolve import Source, resolve_draft
from tests.backends.tiny_pair import save_draft, save_target

SLACK = 24 << 20
"""Bytes that imports and the interpreter may take beside the draft; every attack here asks for more, or never ends."""
Attack = Callable[[Path], object]


class _Payload:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def mark(folder: Path) -> Path:
    """Exists if code of the folder was run."""
    return folder.parent / "code-was-run"


def config(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[bytes], bytes]) -> None:
    path = folder / WEIGHTS_FILE
    path.write_bytes(change(path.read_bytes()))


def header(folder: Path, change: Callable[[dict[str, Any]], object], data: bytes | None = None) -> None:
    """Change the header of the weights file and keep its data."""

    def rewritten(whole: bytes) -> bytes:
        length = int.from_bytes(whole[:8], "little")
        entries = json.loads(whole[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        return len(text).to_bytes(8, "little") + text + (whole[8 + length :] if data is None else data)

    rewrite(folder, rewritten)


def tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    tensors[name] = change(tensors[name].clone())
    save_file(tensors, folder / WEIGHTS_FILE)


def poisoned(value: float) -> Attack:
    def change(weight: torch.Tensor) -> torch.Tensor:
        weight.view(-1)[-1] = value
        return weight

    return lambda folder: tensor(folder, "norm.weight", change)


def sharded(folder: Path, file: str, **changes: Any) -> None:
    """Replace the single file by an index that names `file` for every tensor."""
    names = list(load_file(folder / WEIGHTS_FILE))
    (folder / WEIGHTS_FILE).rename(folder.parent / "outside.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, file)} | changes))


def linked(folder: Path, name: str) -> None:
    """Move a file out and link it."""
    (folder / name).rename(folder.parent / f"outside-{name}")
    (folder / name).symlink_to(folder.parent / f"outside-{name}")


def pipe(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def as_pickle(folder: Path, name: str) -> None:
    (folder / WEIGHTS_FILE).unlink()
    (folder / name).write_bytes(pickle.dumps(_Payload(mark(folder))))


def with_code(folder: Path) -> None:
    """A class of its own whose file would run when imported."""
    (folder / "modeling_evil.py").write_text(f"import os\nos.mkdir({str(mark(folder))!r})\n")
    config(folder, architectures=["EvilModel"], auto_map={"AutoModel": "modeling_evil.EvilModel"})


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def vocabulary(folder: Path, name: str) -> None:
    raw = json.loads((folder / CONFIG_FILE).read_text())
    raw["dflash_config"]["draft_vocabulary_file"] = name
    (folder / CONFIG_FILE).write_text(json.dumps(raw))


def big_vocabulary(folder: Path) -> None:
    vocabulary(folder, "ids.json")
    (folder / "ids.json").write_text("[" + "1, " * (8 << 20) + "2]")


def linked_vocabulary(folder: Path) -> None:
    vocabulary(folder, "ids.json")
    (folder / "ids.json").write_text("[1, 2]")
    linked(folder, "ids.json")


HUGE = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}
WRAPS = {"dtype": "F32", "shape": [1 << 33, 1 << 33], "data_offsets": [0, 1 << 20]}

ATTACKS: dict[str, tuple[Attack, str]] = {
    # the weights file itself
    "truncated": (lambda f: rewrite(f, lambda b: b[:-7]), "damaged"),
    "padded": (lambda f: rewrite(f, lambda b: b + bytes(64)), "damaged"),
    "cut inside the header": (lambda f: rewrite(f, lambda b: b[:60]), "damaged"),
    "empty": (lambda f: rewrite(f, lambda b: b""), "damaged"),
    "header longer than the file": (lambda f: rewrite(f, lambda b: (1 << 62).to_bytes(8, "little") + b[8:]), "damaged"),
    "header that is no JSON": (lambda f: rewrite(f, lambda b: b[:8] + b"x" * (len(b) - 8)), "damaged"),
    "header nested without end": (
        lambda f: rewrite(f, lambda b: (600_001).to_bytes(8, "little") + nested(100_000).encode()),
        "damaged",
    ),
    "one tensor twice": (
        lambda f: rewrite(f, lambda b: (41).to_bytes(8, "little") + b'{"a":{"dtype":"F32"},"a":{"dtype":"F32"}}'),
        "twice",
    ),
    "huge shape": (lambda f: header(f, lambda h: h.update({"norm.weight": HUGE})), "damaged"),
    "shape whose product wraps": (lambda f: header(f, lambda h: h.update({"norm.weight": WRAPS})), "damaged"),
    "negative shape": (lambda f: header(f, lambda h: h["norm.weight"].update(shape=[-32])), "described wrongly"),
    "offsets of another tensor": (
        lambda f: header(f, lambda h: h["norm.weight"].update(data_offsets=h["hidden_norm.weight"]["data_offsets"])),
        "damaged",
    ),
    "unknown type": (lambda f: header(f, lambda h: h["norm.weight"].update(dtype="F3")), "described wrongly"),
    "no offsets": (lambda f: header(f, lambda h: h["norm.weight"].pop("data_offsets")), "described wrongly"),
    "integers": (lambda f: tensor(f, "norm.weight", lambda t: t.int()), "floating-point"),
    "eight-bit floats": (lambda f: tensor(f, "norm.weight", lambda t: t.to(torch.float8_e4m3fn)), "floating-point"),
    "complex": (lambda f: tensor(f, "norm.weight", lambda t: t.to(torch.complex64)), "floating-point"),
    "NaN": (poisoned(float("nan")), "NaN or infinity"),
    "infinity": (poisoned(float("inf")), "NaN or infinity"),
    "another shape": (lambda f: tensor(f, "norm.weight", lambda t: t[:-1].clone()), "has shape"),
    # what the config asks for
    "huge hidden size": (lambda f: config(f, hidden_size=1 << 38), "fc reads|has shape"),
    "huge vocabulary with an own head": (
        lambda f: config(f, vocab_size=1 << 39, architectures=["Qwen3DSparkModel"], markov_rank=1 << 20),
        "belong together",
    ),
    "ten million layers": (lambda f: config(f, num_hidden_layers=10**7, layer_types=None), "not plausible"),
    "ten thousand layers": (lambda f: config(f, num_hidden_layers=10**4, layer_types=None), "lacks layers"),
    "huge block": (lambda f: config(f, block_size=1 << 30), "block_size"),
    "huge number": (lambda f: (f / CONFIG_FILE).write_text('{"hidden_size": ' + "9" * 6000 + "}"), "JSON"),
    "NaN in the config": (lambda f: config(f, rms_norm_eps=float("nan")), "rms_norm_eps"),
    "config nested without end": (lambda f: (f / CONFIG_FILE).write_text(nested(100_000)), "nested too deeply|JSON"),
    "config that contains itself": (
        lambda f: config(f, dflash_config=json.loads((f / CONFIG_FILE).read_text())),
        "must be|differently|no 'mask_token_id'",
    ),
    "config of forty megabytes": (lambda f: config(f, note="x" * (40 << 20)), "no draft's config"),
    "key twice": (lambda f: (f / CONFIG_FILE).write_text('{"block_size": 8, "block_size": 16}'), "stands twice"),
    "config that is a list": (lambda f: (f / CONFIG_FILE).write_text("[" * 9 + "]" * 9), "object"),
    # where files are
    "index to a parent folder": (lambda f: sharded(f, "../outside.safetensors"), "plain name"),
    "index to an absolute path": (lambda f: sharded(f, str(f.parent / "outside.safetensors")), "plain name"),
    "index to a pickle": (lambda f: sharded(f, "pytorch_model.bin"), "safetensors only"),
    "index to nothing": (lambda f: sharded(f, "gone.safetensors"), "cannot be read"),
    "index without a map": (lambda f: sharded(f, "x", weight_map=[1]), "weight_map"),
    "weights linked out": (lambda f: linked(f, WEIGHTS_FILE), "link out of its folder"),
    "config linked out": (lambda f: linked(f, CONFIG_FILE), "link out of its folder"),
    "vocabulary linked out": (linked_vocabulary, "link out of its folder"),
    "vocabulary in a parent folder": (lambda f: vocabulary(f, "../ids.json"), "plain file name"),
    "vocabulary at an absolute path": (lambda f: vocabulary(f, "/etc/passwd"), "plain file name"),
    "vocabulary larger than all ids": (big_vocabulary, "larger than a list"),
    "weights that are a pipe": (lambda f: pipe(f, WEIGHTS_FILE), "no regular file"),
    "config that is a pipe": (lambda f: pipe(f, CONFIG_FILE), "no regular file"),
    # code
    "pickle only": (lambda f: as_pickle(f, "pytorch_model.bin"), "safetensors"),
    "pickle under another name": (lambda f: as_pickle(f, WEIGHTS_FILE), "damaged"),
    "code beside the weights": (with_code, "EvilModel"),
}


def peak_bytes() -> int:
    """Highest resident size since the last reset (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


def reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # another system, or a container that forbids it
        return False
    return True


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_draft(tmp_path_factory.mktemp("sound") / "draft")
    load_draft(folder, torch.device("cpu"), torch.float32)
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes")
@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_folders_are_refused(
    name: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a crash, a hang, memory for a claim, or code: the sound folder with one thing changed."""
    attack, words = ATTACKS[name]
    folder = tmp_path / "draft"
    folder.mkdir()
    for file in sound.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    attack(folder)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    measured, before = reset_peak(), peak_bytes() if sys.platform == "linux" else 0
    with pytest.raises(DFlashError, match=words) as caught:
        load_draft(folder, torch.device("cpu"), torch.float32)
    assert not measured or peak_bytes() - before <= 2 * size + SLACK
    assert not mark(folder).exists()
    with pytest.raises(SystemExit) as left, reported():
        raise caught.value
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert len(said) < 1000


def test_pickles_are_refused_before_the_reader(tmp_path: Path) -> None:
    """Guards against another door: the search for the files says so as well."""
    folder = save_draft(tmp_path / "draft")
    as_pickle(folder, "pytorch_model.bin")
    with pytest.raises(DFlashError, match="can run code"):
        resolve_draft(str(folder), Source(name="t", path=tmp_path))
    assert not mark(folder).exists()


TARGET_ATTACKS = [
    "truncated",
    "huge shape",
    "shape whose product wraps",
    "header nested without end",
    "index to nothing",
    "index to a parent folder",
    "index to an absolute path",
    "index to a pickle",
    "pickle under another name",
]


@pytest.mark.parametrize("name", TARGET_ATTACKS)
def test_hostile_targets_are_refused_before_their_library_opens_them(name: str, tmp_path: Path) -> None:
    """Guards against the same tricks in a target's folder, whose weights are read by Transformers."""
    attack, words = ATTACKS[name]
    folder = save_target(tmp_path / "target")
    tensors = load_file(folder / WEIGHTS_FILE)
    save_file(tensors | {"norm.weight": torch.ones(32)}, folder / WEIGHTS_FILE)  # the name that attacks change
    attack(folder)
    (folder / "decoy.safetensors").write_bytes(b"")  # so that the search for weights is content
    measured, before = reset_peak(), peak_bytes()
    with pytest.raises(DFlashError, match=words):
        open_target(str(folder), dtype="float32", device="cpu")
    assert not measured or peak_bytes() - before <= SLACK
    assert not mark(folder).exists()


def test_the_hubs_own_links_are_followed(tmp_path: Path) -> None:
    """Guards against refusing every downloaded draft: the hub's cache links its files to `blobs` of the repository."""
    repository = tmp_path / "models--someone--draft"
    snapshot = save_draft(repository / "snapshots" / "0123abc")
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(repository / "blobs" / f"blob{number}")
        file.symlink_to(Path("..", "..", "blobs", f"blob{number}"))
    assert load_draft(snapshot, torch.device("cpu"), torch.float32).config.block_size == 8


def test_shards_are_read(tmp_path: Path) -> None:
    """Guards against large drafts, which come in several files with an index, being taken for damaged."""
    folder = save_draft(tmp_path / "draft")
    whole = load_file(folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).unlink()
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    parts = {first: list(whole)[::2], second: list(whole)[1::2]}
    for file, names in parts.items():
        save_file({name: whole[name] for name in names}, folder / file)
    index = {name: file for file, names in parts.items() for name in names}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    loaded = load_draft(folder, torch.device("cpu"), torch.float32).state_dict()
    assert all(torch.equal(loaded[name], value.float()) for name, value in whole.items())
    moved = parts[second][0]
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": index | {moved: first}}))
    with pytest.raises(DFlashError, match=r"promises .*, which its file lacks"):
        load_draft(folder, torch.device("cpu"), torch.float32)
