"""What the safetensors files of a model folder hold, read from their headers: nothing is loaded, nothing is run.

A folder comes from anywhere, so each claim of a header is checked against the file before a byte is reserved for it:
lengths, shapes, offsets, names, and that every file is a regular one inside the folder (or of the hub's cache, which
links its files).
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.core.dialects.base import is_plain_name
from dflash.core.draft_config import WEIGHTS_FILE
from dflash.errors import CheckpointError

INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
_MAX_CONFIG, _MAX_INDEX = 1 << 20, 32 << 20
"""Bytes of a config and of an index, far above any real one: parsed, they take many times as much."""
_MAX_HEADER = 100_000_000
"""The limit of the format's own library."""
_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    **{f"{sign}{bits}": bits for sign in "IU" for bits in (8, 16, 32, 64)},
}
"""Types of the format and their sizes."""
FLOATING = frozenset({"F16", "BF16", "F32", "F64"})
"""Types that a draft's weights may be stored in."""
_NUMPY: dict[str, type[np.generic]] = {"BOOL": np.bool_, "I32": np.int32, "I64": np.int64, "U8": np.uint8}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    file: Path
    dtype: str
    """In the format's own spelling, e.g. "BF16"."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    num_bytes: int


def read_json(path: Path, what: str, *, max_bytes: int = _MAX_CONFIG) -> dict[str, Any]:
    """A JSON object from a regular file of reasonable size. Raises CheckpointError otherwise."""
    size = regular_size(path)
    if size > max_bytes:
        raise CheckpointError(f"{path} has {size} bytes, which is no {what}; download or export it again.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download or export it again.") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply to be a {what}; download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object; download or export it again.")
    return value


def check_weight_files(folder: Path) -> None:
    """Check a target's weights files before its library opens them: whole, and in their folder by name (links may lead
    elsewhere, as people keep large files). Files under unusual names are left to that library.

    Raises CheckpointError for damaged files and for an index that names paths or other formats.
    """
    if (folder / WEIGHTS_FILE).exists():
        _read_header(inside(folder, WEIGHTS_FILE, links=True))
    elif (folder / INDEX_FILE).is_file():
        for file in sorted(set(_index(folder, links=True).values())):
            _read_header(inside(folder, file, links=True))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of `model.safetensors`, or of the files that its index names.

    Raises CheckpointError if there are none, or if a file or its header is damaged or points elsewhere.
    """
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.exists() or single.is_symlink():
        return _read_header(inside(folder, WEIGHTS_FILE))
    if not index.is_file():
        raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}; drafts are read from safetensors only.")
    names = _index(folder)
    headers = {file: _read_header(inside(folder, file)) for file in sorted(set(names.values()))}
    listed = {name: headers[file].get(name) for name, file in names.items()}
    missing = [name for name, tensor in listed.items() if tensor is None]
    extra = [name for header in headers.values() for name in header if name not in names]
    if missing or extra:
        what = f"promises {missing[0]}, which its file lacks" if missing else f"leaves out {extra[0]}"
        raise CheckpointError(f"{index} {what}; download it again.")
    return {name: tensor for name, tensor in listed.items() if tensor is not None}


def _index(folder: Path, *, links: bool = False) -> dict[str, str]:
    """Tensor name -> file, as the index says."""
    path = inside(folder, INDEX_FILE, links=links)
    names = read_json(path, "index", max_bytes=_MAX_INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{path} has no weight_map; download it again.")
    for file in names.values():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path} names the file {file!r}; weights are read from safetensors only.")
    return names


def inside(folder: Path, name: str, *, links: bool = False) -> Path:
    """The file `name` of a folder. Raises CheckpointError if it is a path, or a link that leads out of the folder
    (unless `links` may).

    The hub's cache keeps a repository's files under `models--<name>/blobs` and links them from its snapshots, and from
    folders that are downloaded to; such links are followed.
    """
    if not is_plain_name(name):
        raise CheckpointError(f"{folder} names the file {name!r}, which is not a plain name; nothing was read.")
    path = folder / name
    if path.is_symlink() and not links:
        target = path.resolve()
        in_cache = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
        if not in_cache and not target.is_relative_to(folder.resolve()):
            raise CheckpointError(
                f"{path} is a link out of its folder, to {target}; nothing was read. Copy the file in its place if "
                "it is yours."
            )
    return path


def read_integers(tensor: StoredTensor) -> NDArray[Any]:
    """A table of integers or truth values, in its own type. Raises CheckpointError for another type."""
    kind = _NUMPY.get(tensor.dtype)
    if kind is None:
        raise CheckpointError(f"{tensor.file}: a table of type {tensor.dtype} where integers belong; export it again.")
    values = np.fromfile(tensor.file, dtype=kind, count=math.prod(tensor.shape), offset=tensor.start)
    return values.reshape(tensor.shape)


def regular_size(path: Path) -> int:
    """Bytes of a regular file. Raises CheckpointError for anything else: a pipe or device might never end."""
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}); check the path.") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is no regular file; nothing was read.")
    return status.st_size


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = regular_size(path)
    again = "download or export it again"
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise CheckpointError(f"{path} is damaged (it does not start like a safetensors file); {again}.")
            header = json.loads(stream.read(length), object_pairs_hook=_without_repeats)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged (its header cannot be read: {error}); {again}.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is damaged (its header is no object); {again}.")
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.num_bytes)):
        if tensor.start != end:
            raise CheckpointError(f"{path} is damaged (its tensors overlap or leave gaps); {again}.")
        end += tensor.num_bytes
    if end != size:
        raise CheckpointError(
            f"{path} is damaged (its tensors need {end} bytes, the file has {size}); it was not copied or "
            f"downloaded to its end: {again}."
        )
    return tensors


def _entry(path: Path, name: str, entry: Any, base: int) -> StoredTensor:
    described: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    shape: Any = described.get("shape")
    offsets: Any = described.get("data_offsets")
    kind = str(described.get("dtype"))
    if kind not in _BITS or not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{path}: the tensor {name[:80]!r} is described wrongly or has the unknown type {kind[:20]!r}; "
            "download it again."
        )
    start, end = offsets
    if end - start != -(-math.prod(shape) * _BITS[kind] // 8):
        raise CheckpointError(
            f"{path} is damaged (the tensor {name[:80]!r} of shape {shape} does not take {end - start} bytes); "
            "download it again."
        )
    return StoredTensor(path, kind, tuple(shape), base + start, end - start)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 8 and all(type(n) is int and 0 <= n < 2**48 for n in value)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that stands twice is a contradiction, not an update."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return values
