"""Fixtures of the command line's tests."""

import pytest

from tests.cli.fakes import CommandLine


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command line over a fake engine."""
    return CommandLine(monkeypatch, capsys)
