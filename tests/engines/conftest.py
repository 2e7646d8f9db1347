"""Real serving engines: run only where one is named, since each needs its own environment (`make test-engines`)."""

from __future__ import annotations

from pathlib import Path

import pytest

OPTION = "--vllm-python"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known only where this folder is named on pytest's command line; elsewhere the tests are skipped."""
    parser.addoption(OPTION, default=None, help="interpreter of an environment that holds vLLM")


@pytest.fixture(scope="session")
def vllm_python(request: pytest.FixtureRequest) -> Path:
    """The interpreter of an environment that holds vLLM."""
    given = request.config.getoption(OPTION, default=None)
    if not given:
        pytest.skip(f"needs a vLLM environment: `make test-engines`, or {OPTION}")
    return Path(given).absolute()
