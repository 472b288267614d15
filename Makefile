# The commands of the project. `make help` lists them.

# The newest supported version of torch; the oldest one is in constraints.txt.
NEWEST_TORCH = 2.15.0

TORCH    ?=
VENV     ?= .venv$(if $(TORCH),-torch-$(TORCH))
STRATEGY ?= optim_grads_params
RANKS    ?= 2
ITERS    ?= 120
OUT      ?= out/pretrain
ONE_IN   ?= 1
TIME     ?=
CASES    ?= 1000
SEED     ?= 0
STEPS    ?= 3000
DEVICE   ?= cuda
GPUS     ?=
GPU_OUT  ?= out/gpu
MINUTES  ?=
WRITE    ?=

PY := $(VENV)/bin/python
LONGER := $(PY) -m pytest --one-in "$(ONE_IN)"
QUICK := not gpu and not functional and not slow
LONG := functional or slow
PEERS := $(VENV)-peers
RANDOM_CASES := $(PY) -W ignore -m tests.random.campaign
CLIENTS_PY := $(VENV)-clients/bin/python
NEWEST := .venv-torch-$(NEWEST_TORCH)
NEWEST_PY := $(NEWEST)/bin/python
NEWEST_CLIENTS_PY := $(NEWEST)-clients/bin/python

# Tests of features that change between versions of torch (collectives, DTensor, the autograd engine,
# FSDP2's classes, distributed checkpoint, streams and storages), and a training with Megatron.
TORCH_SAMPLE = $(addprefix tests/distributed/test_, checkpoint.py collectives.py construction.py \
  drop_in.py failures.py fsdp2.py misuse.py parameters.py precision.py stream_safety.py \
  tensor_parallel.py torch_checkpoint.py torch_versions.py uneven_dtensor.py) \
  $(addprefix tests/unit/test_, checkpoint_export.py exposure.py fsdp2_surface.py \
  simulation.py torch_private_names.py) \
  tests/parity/test_parity.py::test_pattern_trains_like_the_reference tests/golden \
  functional_tests/test_matrix.py

# Tests with other libraries that also run with the newest torch: all of them at the end of a larger
# change (test-all), otherwise a few of each library and of each adapter.
NEWEST_CLIENTS = tests/clients --ignore tests/clients/test_local_checkpoints.py \
  --ignore tests/clients/test_optimizers.py \
  --ignore tests/clients/test_torchao.py \
  --ignore tests/clients/test_torchtitan.py
NEWEST_CLIENTS_SAMPLE = tests/clients/newest $(addprefix tests/clients/test_, \
  accelerate.py::test_prepared_model_trains_like_unsharded \
  automodel.py::test_llama_trains_like_unsharded \
  bridge.py::test_recipe_resumes_at_another_size \
  hf_distributed.py::test_from_pretrained_shards_and_trains_like_unsharded \
  hf_generation.py::test_ranks_may_generate_different_lengths_with_synced_gpus \
  hf_training.py::test_trainer_trains_a_sharded_model_like_a_plain_model \
  lightning.py::test_trainer_with_clipping_accumulation_and_validation_matches_unsharded \
  peft.py::test_adapters_with_frozen_weights_train_like_unsharded)

# TEXT is also passed on if it is empty, so that the program reports the error.
ifneq ($(origin TEXT),undefined)
TEXT_OPTION = --text "$(TEXT)"
endif

.DEFAULT_GOAL := help
.PHONY: help setup pretrain test test-all test-random test-functional test-upstream test-matrices test-trainings test-share test-clients soak test-fsdp2 test-megatron-fsdp test-torch lint golden test-gpu bench docs

help: ## list the targets and their variables
	@awk 'BEGIN { FS = ":.*## " } /^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '%s\n' '' 'Variables:' \
	  '  VENV=path      folder of the environment (.venv)' \
	  '  PYTHON=path    setup: the Python >= 3.12 to use (searched on PATH)' \
	  '  TORCH=version  another version of torch, in a separate environment (.venv-torch-<version>)' \
	  '  PYTORCH=path   test-fsdp2: a checkout of PyTorch, of the installed or a similar version' \
	  '  MEGATRON=path  test-megatron-fsdp: a checkout of Megatron-LM of August 2026' \
	  '  STRATEGY=name  pretrain: sharding strategy (optim_grads_params)' \
	  '  RANKS=n        pretrain: number of ranks (2)' \
	  '  ITERS=n        pretrain: iterations of the first run (120)' \
	  '  TEXT=path      pretrain: a file or folder of text (the sources of the Python library)' \
	  '  OUT=path       pretrain: folder for data, logs, checkpoints and the plot (out/pretrain)' \
	  '  ONE_IN=n       longer tests, test-torch: run one of every n tests, selected by the commit (1)' \
	  '  TIME=minutes   test-all: start no test after this time; the next call continues (no limit)' \
	  '  CASES=n        test-random: number of cases (1000)' \
	  '  SEED=n         test-random, soak: seed of the first case, or of the kills (0)' \
	  '  STEPS=n        soak: steps, with one kill of every 200 (3000)' \
	  '  DEVICE=name    test-gpu: cuda, or cpu to rehearse the checks (cuda)' \
	  '  GPUS=n         test-gpu: number of ranks (all GPUs; 2 on a CPU)' \
	  '  GPU_OUT=path   test-gpu: folder of the report (out/gpu)' \
	  '  MINUTES=n      test-gpu: start no check after this time (no limit)' \
	  '  WRITE=1        bench: write the results to docs/performance.md'

setup: ## create the environment with pinned dependencies
	@VENV="$(VENV)" PYTHON="$(PYTHON)" TORCH="$(TORCH)" tools/setup.sh

.PHONY: setup-newest
setup-newest: # the environment of test-torch
	@$(MAKE) --no-print-directory setup TORCH=$(NEWEST_TORCH)

.PHONY: setup-clients
setup-clients: setup setup-newest # the environments of test-clients
	@VENV="$(VENV)" tools/setup_clients.sh
	@VENV="$(NEWEST)" REQUIREMENTS=tests/clients/newest/requirements.txt tools/setup_clients.sh

.PHONY: setup-pretrain
setup-pretrain: # a part of the environment; `make test` adds the rest
	@VENV="$(VENV)" PYTHON="$(PYTHON)" TORCH="$(TORCH)" PARTS=pretrain tools/setup.sh

pretrain: setup-pretrain ## pretrain a small GPT on real text, save, resume, show the result
	@$(PY) -m examples.pretrain_text --strategy "$(STRATEGY)" --ranks "$(RANKS)" \
	  --iters "$(ITERS)" --out "$(OUT)" $(TEXT_OPTION)

# Style, types and layering do not depend on torch and are checked only with the pinned version.
test: $(if $(TORCH),setup,lint) ## lint, then the tests and the quick rows of the functional matrix
	@$(PY) -m pytest -m "$(QUICK)"

test-all: lint setup-clients ## every suite once, with the time left; not again what passed on this commit
	@$(PY) -m tools.test_all $(if $(TIME),--minutes "$(TIME)") \
	  --suite 'tests: $(PY) -m pytest -m "not gpu"' \
	  --suite 'clients: $(CLIENTS_PY) -m pytest tests/clients --ignore tests/clients/newest' \
	  --suite 'clients, torch $(NEWEST_TORCH): $(NEWEST_CLIENTS_PY) -m pytest $(NEWEST_CLIENTS)' \
	  --suite 'torch $(NEWEST_TORCH): $(NEWEST_PY) -m pytest -m "not gpu and not functional" $(TORCH_SAMPLE)' \
	  --program 'dist: make --no-print-directory dist' \
	  --program 'random cases from 0: $(RANDOM_CASES) --cases 334 --seed 0' \
	  --program 'random cases from 334: $(RANDOM_CASES) --cases 333 --seed 334' \
	  --program 'random cases from 667: $(RANDOM_CASES) --cases 333 --seed 667'

test-random: setup ## random cases against a plain loop, then a training of 2,000 steps
	@$(RANDOM_CASES) --cases "$(CASES)" --seed "$(SEED)"
	@$(PY) -m pytest -m functional tests/random

test-functional: setup ## the whole functional matrix against Megatron's own DDP
	@$(LONGER) --tables functional_tests --ignore functional_tests/upstream

test-upstream: setup ## Megatron-LM's own configurations, shrunk, against Megatron's own DDP
	@$(LONGER) --tables functional_tests/upstream

test-matrices: setup ## every cell of the core's matrices: parity, golden, events, trace pool, checkpoints, streams
	@$(LONGER) --tables -m "$(LONG)" tests/parity tests/golden tests/machine tests/distributed tests/unit

test-trainings: setup ## the longer trainings with Megatron: checkpoints, features, rehearsal
	@$(LONGER) -m "$(LONG)" tests/mcore tests/docs

test-share: setup ## a sample of the four suites above: one of every ONE_IN tests
	@$(LONGER) -m "$(LONG)" --ignore tests/random

test-clients: setup-clients ## programs of other libraries (transformers, peft, Lightning, ...), sharded
	@$(CLIENTS_PY) -m pytest --tables --one-in "$(ONE_IN)" tests/clients --ignore tests/clients/newest
	@$(NEWEST_CLIENTS_PY) -m pytest --tables --one-in "$(ONE_IN)" $(NEWEST_CLIENTS_SAMPLE)

soak: setup-clients ## replica groups of torchft whose ranks are killed at random times, about 20 minutes
	@$(CLIENTS_PY) -m tests.clients.soak --steps "$(STEPS)" --seed "$(SEED)"

test-fsdp2: setup ## PyTorch's own tests of FSDP2, from PYTORCH, run with this package
	@test -d "$(PYTORCH)/test/distributed" || { echo "PYTORCH=path/to/checkout must name a checkout of PyTorch with its tests" >&2; exit 2; }
	@VENV="$(VENV)" $(if $(TORCH),REQUIREMENTS=tests/clients/newest/requirements.txt) tools/setup_clients.sh
	@$(CLIENTS_PY) -m pytest tests/fsdp2_suite --pytorch "$(PYTORCH)"

test-megatron-fsdp: setup ## Megatron-LM's own tests of Megatron-FSDP, from MEGATRON, run with this package
	@test -d "$(MEGATRON)/tests/unit_tests/distributed" || { echo "MEGATRON=path/to/checkout must name a checkout of Megatron-LM with its tests" >&2; exit 2; }
	@$(PY) -m pytest tests/upstream_suite --megatron "$(MEGATRON)"

test-torch: setup-newest ## a sample of the tests with the newest supported torch
	@$(MAKE) --no-print-directory sample TORCH=$(NEWEST_TORCH)

.PHONY: sample
sample: # the sample of the tests, in the existing environment
	@$(PY) -m pytest -m "$(QUICK)" --quick-one-in "$(ONE_IN)" $(TORCH_SAMPLE)

golden: setup ## write the golden records: collectives, memory, numbers
	@$(PY) -m tests.golden --write

lint: setup ## ruff, format check, type check, import layering
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-logo

.PHONY: dist
dist: ## the wheel and the source distribution that it is built from, checked, in out/dist
	@VENV="$(VENV)" PYTHON="$(PYTHON)" tools/setup_docs.sh
	@rm -rf out/dist && mkdir -p out
	@$(VENV)-docs/bin/python -m build --outdir out/dist . >out/dist.log || { tail -n 20 out/dist.log >&2; exit 1; }
	@$(VENV)-docs/bin/twine check --strict out/dist/*

docs: ## the documentation as a site: out/site/index.html
	@VENV="$(VENV)" PYTHON="$(PYTHON)" tools/setup_docs.sh
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict
	@echo "out/site/index.html"

test-gpu: setup ## all checks that need a GPU, on all GPUs of this machine, with one report
	@mkdir -p "$(GPU_OUT)"
	@PYTHONUNBUFFERED=1 bash -o pipefail -c '"$$@" 2>&1 | tee "$(GPU_OUT)/report.txt"' - $(PY) -m pytest tests/gpu -v \
	  --device "$(DEVICE)" $(if $(GPUS),--ranks "$(GPUS)") $(if $(MINUTES),--minutes "$(MINUTES)") --basetemp "$(GPU_OUT)/logs"

$(PEERS): tools/peer-packages.txt | setup
	@rm -rf "$@"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-input --no-deps --only-binary :all: \
	  --target "$@" --requirement $<
	@touch "$@"

bench: setup $(PEERS) ## benchmark against peers on this machine
	@$(PY) -m benchmarks $(if $(WRITE),--write-docs)
	@$(PY) -m benchmarks.megatron
	@$(PY) -m benchmarks.optimizer_time
	@$(PY) -m benchmarks.muon --ranks 2
	@$(PY) -m benchmarks.muon --ranks 4
	@$(PY) -m benchmarks.checkpoint
