"""GGUF targets: converted once to plain safetensors in the user's cache.

Transformers unpacks the file; the values are stored in bfloat16, whatever dtype they are later run in, so that
float32 and bfloat16 runs have identical weights. The conversion runs in a child process (`python -m` this
module): Transformers' progress bars and warnings stay off the terminal without touching anything process-wide,
its memory goes back to the system, and an interrupted one leaves nothing half written (`dflash/cache.py`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash.cache import build_once, cache_root, file_sha256
from dflash.errors import CheckpointError
from dflash.registry import TARGETS
from dflash.resolve import Progress, Source

_POLL_SECONDS = 0.2
_KEY_LENGTH = 16
_IMPORT_ROOT = Path(__file__).parents[3]
"""Working folder of the child, so that it finds `dflash` even in a source tree that is not installed."""

Convert = Callable[[Path, Path, Progress | None], None]
"""(GGUF file, output folder, progress): writes config, safetensors and tokenizer into the folder."""


def converted_folder(
    source: Source, *, cache: Path | None = None, progress: Progress | None = None, convert: Convert | None = None
) -> Path:
    """The safetensors folder of a GGUF target, converting it first if need be.

    The folder's key is the file's content (SHA-256), so a changed file is converted anew; for a built-in target
    the digest is known and compared at conversion only. `cache` and `convert` are replaced in tests.

    Raises CheckpointError if the file is damaged or cannot be read, ConfigError if the cache cannot be written.
    """
    with _reading(source.path):
        digest = source.sha256 or file_sha256(source.path)
    label = source.name if source.name in TARGETS else source.path.stem
    run = convert or convert_in_child

    def build(temporary: Path) -> None:
        with _reading(source.path):
            _check_magic(source.path)
            changed = source.sha256 is not None and file_sha256(source.path) != digest
        if changed:
            raise CheckpointError(
                f"{source.path} has other bytes than the published file (SHA-256 differs); reinstall the package "
                "it belongs to with pip's option --force-reinstall."
            )
        run(source.path, temporary, progress)

    def wait(reason: str) -> None:
        if progress is not None:
            progress(reason, None)

    folder = (cache or cache_root()) / "targets" / label / digest[:_KEY_LENGTH]
    return build_once(folder, build, source={"file": source.path.name, "sha256": digest}, wait=wait)


def convert_in_child(gguf: Path, folder: Path, progress: Progress | None) -> None:
    """Run `convert` in a child process, which is stopped if we are interrupted.

    Raises CheckpointError with the child's last line of complaint.
    """
    started = time.monotonic()
    command = [sys.executable, "-m", __name__, str(gguf.absolute()), str(folder.absolute())]
    with tempfile.TemporaryFile() as complaints:  # a pipe nobody drains could fill up and block the child
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=complaints, stderr=complaints, cwd=_IMPORT_ROOT
        )
        try:
            while child.poll() is None:
                if progress is not None:
                    progress(f"converting {gguf.name} once (about half a minute)", None)
                time.sleep(_POLL_SECONDS)
        finally:
            child.kill()
            child.wait()
        if child.returncode:
            complaints.seek(0)
            lines = complaints.read().decode("utf-8", errors="replace").strip().splitlines()
            raise CheckpointError(
                f"{gguf} could not be converted after {time.monotonic() - started:.0f} s "
                f"({lines[-1] if lines else f'exit status {child.returncode}'}). "
                "Check the file, or give the model's safetensors folder or hub id instead."
            )


def convert(gguf: Path, folder: Path) -> None:
    """Unpack a GGUF file into `folder`: config, generation config, bfloat16 safetensors and tokenizer.

    Loud (progress bars) and slow: parsing the vocabulary takes most of 15-30 s. Raises what Transformers raises.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Newer versions keep weights packed, which cannot be saved, unless told otherwise; older ones always unpack.
    packing = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": packing(dequantize=True)} if packing else {}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **options)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


@contextmanager
def _reading(gguf: Path) -> Iterator[None]:
    """Around reading the GGUF file itself, so that its faults are not taken for the cache's."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{gguf} cannot be read ({error.strerror or error}); check its permissions.") from error


def _check_magic(path: Path) -> None:
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise CheckpointError(f"{path} does not start like a GGUF file; download it again.")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
