"""Choices made at load (device, dtype, threads) and the conversion of GGUF targets."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from dflash.backends.torch.draft_loading import load_draft
from dflash.backends.torch.gguf import convert_in_child, converted_folder
from dflash.backends.torch.loading import (
    choose_device,
    choose_dtype,
    fits_memory,
    open_target,
    physical_cores,
    set_threads,
)
from dflash.cache import damage
from dflash.errors import CheckpointError, ConfigError
from dflash.resolve import Progress, Source
from tests.backends.tiny_pair import save_draft, save_target

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx2", "avx512f"}, torch.float32),
        ({"avx512_bf16"}, torch.bfloat16),
        ({"amx_bf16", "amx_tile"}, torch.bfloat16),
        ({"asimd", "bf16"}, torch.bfloat16),
        (set(), torch.float32),
    ],
)
def test_default_dtype_is_the_fast_one(flags: set[str], expected: torch.dtype) -> None:
    """bf16 is emulated eight times slower on CPUs without bf16 units."""
    assert choose_dtype(None, CPU, cpu_flags=frozenset(flags)) == expected
    assert choose_dtype("auto", CPU, cpu_flags=frozenset(flags)) == expected
    assert choose_dtype("bf16", CPU, cpu_flags=frozenset(flags)) == torch.bfloat16
    assert choose_dtype("float32", CPU, cpu_flags=frozenset(flags)) == torch.float32


def test_default_device() -> None:
    """A GPU if there is one."""
    assert choose_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == CPU


@pytest.mark.skipif(sys.platform != "linux", reason="CPU affinity")
def test_physical_cores(tmp_path: Path) -> None:
    """Hyper-threads count once, a container's quota caps, a machine without these files counts CPUs."""
    mine = sorted(os.sched_getaffinity(0))
    for cpu in mine:
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-999\n")
    assert physical_cores(topology=tmp_path, quota=tmp_path / "none") == 1
    assert physical_cores(topology=tmp_path / "none", quota=tmp_path / "none") == len(mine)
    quota = tmp_path / "cpu.max"
    for text, expected in (("max 100000", len(mine)), ("50000 100000", 1), ("garbage", len(mine))):
        quota.write_text(text)
        assert physical_cores(topology=tmp_path / "none", quota=quota) == expected


def test_threads_keep_to_an_earlier_limit() -> None:
    """OMP_NUM_THREADS=1 beside another job must not be overruled by the default (twenty-fold slow-down)."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert set_threads(None) == 1
        assert set_threads(2) == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("number", [0, -1, 4097, 10**11, 10**20])
def test_numbers_of_threads_that_are_none(number: int) -> None:
    """Fault: PyTorch's overflow as a traceback, or a process that OpenMP ends."""
    before = torch.get_num_threads()
    with pytest.raises(ConfigError, match=r"number of threads must be at (least 1|most 4096)"):
        set_threads(number)
    assert torch.get_num_threads() == before


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A one-layer Llama with a vocabulary of seven; returns the float32 tensors by GGUF name."""
    hidden, inner, heads, kv_heads = 32, 64, 4, 2
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "ba"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "b a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(tokens), hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (len(tokens), hidden),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.ffn_norm.weight": (hidden,),
        "blk.0.attn_q.weight": (hidden, hidden),
        "blk.0.attn_k.weight": (hidden // 2, hidden),
        "blk.0.attn_v.weight": (hidden // 2, hidden),
        "blk.0.attn_output.weight": (hidden, hidden),
        "blk.0.ffn_gate.weight": (inner, hidden),
        "blk.0.ffn_up.weight": (inner, hidden),
        "blk.0.ffn_down.weight": (hidden, inner),
    }
    tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_gguf_becomes_bf16_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real conversion in its child process: silent, stored as bf16, loaded as the same values in fp32."""
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    tensors = write_gguf(tmp_path / "toy.gguf")
    seen: list[str] = []
    loaded = open_target(
        str(tmp_path / "toy.gguf"), dtype="float32", device="cpu", progress=lambda what, share: seen.append(what)
    )
    assert capfd.readouterr() == ("", "")
    assert "converting toy.gguf" in seen[0]
    assert damage(loaded.folder, hashes=True) is None
    assert loaded.folder.parent == tmp_path / "cache" / "targets" / "toy"
    assert json.loads((loaded.folder / "config.json").read_text())["dtype"] == "bfloat16"
    head = torch.from_numpy(tensors["output.weight"]).bfloat16().float()
    assert torch.equal(loaded.model.get_output_embeddings().weight, head)
    assert loaded.tokenizer("ab")["input_ids"][-1] == 5
    (tmp_path / "toy.gguf").write_bytes((tmp_path / "toy.gguf").read_bytes())  # same content, new file: no conversion
    source = Source(name="toy", path=tmp_path / "toy.gguf")
    assert converted_folder(source, convert=must_not_run) == loaded.folder


def must_not_run(path: Path, folder: Path, progress: Progress | None) -> None:
    raise AssertionError("already converted")


def test_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    """The child's complaint becomes our message; the next start tries again."""
    file = tmp_path / "toy.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    source = Source(name="toy", path=file)
    with pytest.raises(CheckpointError, match="could not be converted"):
        converted_folder(source, cache=tmp_path / "cache", convert=convert_in_child)
    assert list((tmp_path / "cache" / "targets" / "toy").glob("*")) == list(
        (tmp_path / "cache" / "targets" / "toy").glob("*.lock")
    )


def test_changed_package_file_is_refused(tmp_path: Path) -> None:
    """A built-in target's digest is known: other bytes under its name are damage, not a new model."""
    file = tmp_path / "toy.gguf"
    file.write_bytes(b"GGUF other bytes")
    source = Source(name="smollm2-135m", path=file, sha256="0" * 64)
    with pytest.raises(CheckpointError, match="force-reinstall"):
        converted_folder(source, cache=tmp_path / "cache", convert=must_not_run)


@pytest.mark.parametrize("name", ["toy", "smollm2-135m"])
def test_unreadable_gguf_is_no_fault_of_the_cache(tmp_path: Path, name: str) -> None:
    """A file that the system refuses must be named, not the folder that would have been written."""
    file = tmp_path / "toy.gguf"
    file.mkdir()  # as unreadable as a file without permission, for the superuser too
    source = Source(name=name, path=file, sha256="0" * 64 if name == "smollm2-135m" else None)
    with pytest.raises(CheckpointError, match=r"toy\.gguf cannot be read"):
        converted_folder(source, cache=tmp_path / "cache", convert=must_not_run)


# Memory

NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]


def raising(error: Exception) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise error

    return refuse


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("stage", ["transformers.AutoModelForCausalLM.from_pretrained", "torch.nn.Module.to"])
def test_a_target_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, error: Exception
) -> None:
    """The commonest failure on a GPU must name what would fit, not call the weights unreadable: while they are read
    and while they are moved."""
    folder = save_target(tmp_path / "target")
    monkeypatch.setattr(stage, raising(error))
    with pytest.raises(ConfigError, match=r"target '.*' in float32 does not fit.*dtype bfloat16 or a smaller model"):
        open_target(str(folder), dtype="float32", device="cpu")


def test_a_draft_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft comes last, onto a device that the target has nearly filled."""
    folder = save_draft(tmp_path / "draft")
    monkeypatch.setattr(torch.Tensor, "to", raising(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(ConfigError, match=r"draft .*draft in float32 does not fit"):
        load_draft(folder, CPU, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "device", "cure"),
    [
        (torch.float32, "cuda:1", "use device cpu or dtype bfloat16 or a smaller model."),
        (torch.bfloat16, "cuda:1", "use device cpu or a smaller model."),
        (torch.bfloat16, "cpu", "use a smaller model."),
    ],
)
def test_the_cure_for_too_little_memory(dtype: torch.dtype, device: str, cure: str) -> None:
    """A cure that is in use already is none."""
    with pytest.raises(ConfigError) as caught, fits_memory("it", dtype, torch.device(device)):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert str(caught.value).endswith(f"does not fit into the memory of device {device}; {cure}")


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), OSError(errno.EACCES, "denied")])
def test_other_errors_are_not_called_lack_of_memory(error: Exception) -> None:
    """A wrong cure is worse than none."""
    with pytest.raises(type(error)) as caught, fits_memory("it", torch.float32, CPU):
        raise error
    assert caught.value is error
