"""`--backend`: which engine a verb opens, and what it says where that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash import registry
from dflash.errors import ConfigError, MissingExtra
from tests.backends.tiny_pair import draft_config, random_draft, save_draft, save_target
from tests.cli.fakes import CommandLine


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


def test_generate_on_both_backends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Guards against an option that is read by no verb: the record names the device, and the tokens are the same."""
    pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
    target = save_target(tmp_path / "target")
    draft = save_draft(tmp_path / "draft", random_draft(draft_config()))
    command_line = CommandLine(monkeypatch, capsys, fake=False)
    records = []
    for backend in ("torch", "mlx"):
        result = command_line.run(
            "generate",
            "-t",
            str(target),
            "-d",
            str(draft),
            "--backend",
            backend,
            "--dtype",
            "float32",
            "-n",
            "12",
            "--json",
            "hello",
        )
        assert result.code == 0, result.err
        records.append(json.loads(result.out))
    assert [record["engine"]["device"].split()[0] for record in records] == ["cpu", "mlx"]
    assert records[0]["token_ids"] == records[1]["token_ids"]
