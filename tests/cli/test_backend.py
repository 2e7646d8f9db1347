"""`--backend`: which engine a verb opens, and what it says where that cannot be."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from dflash import registry
from dflash.errors import ConfigError, MissingExtra
from tests.backends.tiny_pair import draft_config, random_draft, save_draft, save_target
from tests.cli.fakes import CommandLine

needs_mlx = pytest.mark.skipif(
    importlib.util.find_spec("mlx") is None, reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')"
)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="'jax' is unknown; use one of torch, mlx"):
        registry.backend_loader("jax")


def test_without_mlx_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback of an import on a machine without MLX; other missing modules are faults of ours."""

    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(registry, "load_attribute", lambda reference: missing("mlx.core"))
    with pytest.raises(MissingExtra, match=r"pip install 'dflash\[mlx\]'"):
        registry.backend_loader("mlx")
    monkeypatch.setattr(registry, "load_attribute", lambda reference: missing("dflash.gone"))
    with pytest.raises(ModuleNotFoundError, match="gone"):
        registry.backend_loader("mlx")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A tiny pair whose keys and values can be quantised."""
    folder = tmp_path_factory.mktemp("pair")
    draft = save_draft(folder / "draft", random_draft(draft_config()))
    return str(save_target(folder / "target", head_dim=64)), str(draft)


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> CommandLine:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    return CommandLine(monkeypatch, capsys, fake=False)


def words(pair: tuple[str, str], backend: str) -> tuple[str, ...]:
    return ("-t", pair[0], "-d", pair[1], "--backend", backend, "--dtype", "float32")


@needs_mlx
def test_generate_on_both_backends(command_line: CommandLine, pair: tuple[str, str]) -> None:
    """Guards against an option that is read by no verb: the record names the device, and the tokens are the same."""
    records = []
    for backend in ("torch", "mlx"):
        result = command_line.run("generate", *words(pair, backend), "-n", "12", "--json", "hello")
        assert result.code == 0, result.err
        records.append(json.loads(result.out))
    assert [record["engine"]["device"].split()[0] for record in records] == ["cpu", "mlx"]
    assert records[0]["token_ids"] == records[1]["token_ids"]


@needs_mlx
def test_quantised_keys_and_values(command_line: CommandLine, pair: tuple[str, str]) -> None:
    """Guards against an option that does not reach the engine, or that another backend takes and ignores."""
    texts = []
    for more in ((), ("--kv-bits", "4")):
        result = command_line.run("generate", *words(pair, "mlx"), *more, "-n", "24", "--ignore-eos", "--json", "hello")
        assert result.code == 0, result.err
        texts.append(json.loads(result.out)["token_ids"])
    assert texts[0] != texts[1]
    refused = command_line.run("generate", *words(pair, "torch"), "--kv-bits", "4", "hello")
    assert refused.code == 2
    assert "--kv-bits" in refused.err
    odd = command_line.run("generate", *words(pair, "mlx"), "--kv-bits", "3", "hello")
    assert odd.code == 2
    assert "4 or 8" in odd.err


@needs_mlx
def test_calibrate_on_mlx(command_line: CommandLine, pair: tuple[str, str], tmp_path: Path) -> None:
    """Guards against a calibration that measures the other backend, or is kept where loading does not look."""
    result = command_line.run("calibrate", *words(pair, "mlx"), "--seconds", "0", "--limit", "1", "--json")
    assert result.code == 0, result.err
    record = json.loads(result.out)
    assert record["engine"]["device"].startswith("mlx")
    assert record["verify"]["rows"] == [1, 2, 4, 8, 16]
    assert record["draft_seconds"] > 0
    assert record["compared"][0]["predicted_tokens_per_second"] > 0
    files = list((tmp_path / "cache" / "costs").iterdir())
    assert len(files) == 1, "loading and calibrating must agree on the file"
    assert json.loads(files[0].read_text())["verify"] == record["verify"]


@needs_mlx
def test_audit_on_mlx(command_line: CommandLine, pair: tuple[str, str]) -> None:
    """Guards against an audit of the other backend: what was found holds for one library only."""
    small = ("--backend", "mlx", "--dtype", "float32", "-n", "6", "--runs", "2", "--limit", "1")
    result = command_line.run("audit", *pair, *small, "--json")
    assert result.code == 0, result.err
    record = json.loads(result.out)
    assert record["passed"] is True
    assert record["engine"]["device"].startswith("mlx")
    assert record["widths"]["kinds"] == {"KVCache": 3}
    assert record["laws"][0]["num_runs"] == 2
