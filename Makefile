# Everything a user of the project types. `make help` lists it.

VENV     ?= .venv
STRATEGY ?= optim_grads_params
RANKS    ?= 2
ITERS    ?= 300
OUT      ?= out/pretrain

PY := $(VENV)/bin/python

# TEXT is passed on whenever it is given, also when it is given empty: that is an error to report.
ifneq ($(origin TEXT),undefined)
TEXT_OPTION = --text "$(TEXT)"
endif

.DEFAULT_GOAL := help
.PHONY: help setup pretrain test test-functional test-matrices test-trainings lint test-gpu bench

help: ## list the targets and their variables
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '%s\n' '' 'Variables:' \
	  '  VENV=path      where the environment lives (.venv)' \
	  '  PYTHON=path    the Python >= 3.12 that set-up uses (found by itself)' \
	  '  STRATEGY=name  pretrain: sharding strategy (optim_grads_params)' \
	  '  RANKS=n        pretrain: number of ranks (2)' \
	  '  ITERS=n        pretrain: iterations of the first run (300)' \
	  '  TEXT=path      pretrain: a file or folder of text (the sources of the Python library)' \
	  '  OUT=path       pretrain: where data, logs, checkpoints and the plot go (out/pretrain)'

setup: ## create the environment with pinned dependencies
	@VENV="$(VENV)" PYTHON="$(PYTHON)" tools/setup.sh

pretrain: setup ## pretrain a small GPT on real text, save, resume, show the result
	@$(PY) -m examples.pretrain_text --strategy "$(STRATEGY)" --ranks "$(RANKS)" \
	  --iters "$(ITERS)" --out "$(OUT)" $(TEXT_OPTION)

test: lint ## lint, then the tests and the quick rows of the functional matrix
	@$(PY) -m pytest -m "not gpu and not functional"

test-functional: setup ## the whole functional matrix against Megatron's own DDP
	@$(PY) -m pytest functional_tests

test-matrices: setup ## every cell of the core's matrices: parity, trace pool, checkpoints, streams
	@$(PY) -m pytest -m functional tests/parity tests/distributed tests/unit

test-trainings: setup ## the longer trainings with Megatron: checkpoints, features, rehearsal
	@$(PY) -m pytest -m functional tests/mcore tests/docs

lint: setup ## ruff, format check, type check, import layering
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-logo

test-gpu: setup ## the tests that need a GPU
	@$(PY) -m pytest -m gpu tests/gpu

bench: setup ## benchmark against peers on this machine
	@$(PY) -m benchmarks
	@$(PY) -m benchmarks.host_time
	@$(PY) -m benchmarks.muon --ranks 2
	@$(PY) -m benchmarks.muon --ranks 4
	@$(PY) -m benchmarks.checkpoint
