# Each target does all of its own set-up and is quick once that is done.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# 'results' is also a folder: without this make would take it for done
.PHONY: demo test test-slow test-gpu test-sweep test-sampling check docs results format clean help

help:           ## what there is
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  +##' $(MAKEFILE_LIST) | sed -E 's/:.*##/  —/'

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "python3 (3.11 or newer) is needed; set PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "nsr needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing nsr and what it needs into $(VENV) (once; PyTorch is large, about two minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(READY)  ## the main job: a GNN falls far behind its null-space residual (≤ 5 minutes on two cores)
	@$(BIN)/nsr demo

test: $(READY)  ## the fast tests (≤ 12 minutes on two cores)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal

test-slow: $(READY)  ## everything that runs on a CPU
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal -m "not gpu and not sampling"

test-gpu: $(READY)  ## what needs a CUDA device
	@$(BIN)/python -m pytest -q -m gpu

test-sweep: $(READY)  ## sweeps at length: a Ray cluster that loses a worker, 200 runs on four workers (a minute or two)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow tests/experiments/test_sweep.py

test-sampling: $(READY)  ## sampled graphs; builds torch-sparse from source the first time (about ten minutes)
	@$(BIN)/python -c 'import torch_sparse' 2>/dev/null || $(BIN)/python -m pip install --quiet --no-build-isolation setuptools wheel torch-scatter torch-sparse
	@$(BIN)/python -m pytest -q -m sampling

check: $(READY)  ## ruff (lint, format) and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(READY)  ## the documentation as a site in site/, every warning an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

results: $(READY)  ## the tables inside README.md and docs/results.md, from the files under results/
	@$(BIN)/nsr report --renew README.md --renew docs/results.md

format: $(READY)  ## let ruff put the code in order
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:          ## remove the environment and every cache
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis outputs site report
