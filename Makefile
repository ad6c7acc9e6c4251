# Every verb a developer or CI needs. `make serve` and `make test` work from nothing on a fresh machine.

# The first that runs and is new enough: a name on PATH may be a shim (pyenv) for a version that is not active.
PYTHON ?= $(shell for p in python3.12 python3.13 python3.11 python3; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$p && break; done)
VENV   := .venv
BIN    := $(VENV)/bin
HOST   ?= 127.0.0.1
PORT   ?= 8000
MODEL  ?=
ADAPTERS ?=
ARGS   ?=
# Test files run side by side, one a core.
JOBS   ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
# On a machine with an NVIDIA GPU `make serve` installs the extra `gpu` too, and the server's `auto` takes the GPU. Its
# kernels are compiled at the first start: without nvcc it cannot be used, and the CPU serves unless a device is named.
GPU    := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && echo yes)
NVCC   := $(shell command -v nvcc || PATH=/usr/local/cuda/bin command -v nvcc)
NAMED  := $(or $(PUNICA_DEVICE),$(PUNICA_CONFIG),$(findstring --config,$(ARGS)),$(findstring --device,$(ARGS)))
NO_GPU := $(if $(GPU),$(if $(or $(NVCC),$(NAMED)),,yes))
# pip shows a bar for each download, but not when it is quiet: a log gets the quiet, a terminal the bars.
QUIET  := $(shell test -t 2 || echo --quiet)

.PHONY: serve test check fmt unit parity kernels clean help

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort

serve: $(VENV)/.serve$(and $(GPU),$(NVCC),-gpu)  ## set up if needed, then serve (PORT=, MODEL=, ADAPTERS=, HOST=, ARGS="--more flags")
	$(if $(NO_GPU),@echo "There is an NVIDIA GPU but no nvcc (CUDA toolkit) to compile kernels for it: serving on the CPU.")
	@exec $(BIN)/punica serve $(if $(NO_GPU),--device cpu) --host $(HOST) --port $(PORT) \
	    $(if $(MODEL),--model "$(MODEL)") $(if $(ADAPTERS),--adapters "$(ADAPTERS)") $(ARGS)

test: check unit ## set up if needed, then run every check and test

check: $(VENV)/.dev    ## lint, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(VENV)/.dev     ## the tests (PYTEST="-k name" to choose)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST)

parity: $(VENV)/.dev   ## every demo prompt × every adapter against PEFT, on the real demo model (minutes)
	$(BIN)/python -m pytest -m slow --timeout 3600 tests/parity $(PYTEST)

kernels: $(VENV)/.dev  ## compile the CUDA kernels for every known architecture (needs nvcc, no GPU)
	$(BIN)/python -m punica_core.ops.build

fmt: $(VENV)/.dev      ## format the code
	$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format .

clean:           ## remove the environment and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and none was found: install it, or name it: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is $$($(PYTHON) --version); Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "Could not create a virtual environment (on Debian and Ubuntu: apt install python3-venv)"; exit 1; }

# Before minutes of installing; later the server itself says so at once.
define CHECK_PORT
	@$(if $(or $(findstring --port,$(ARGS)),$(findstring --host,$(ARGS))),:,$(BIN)/python -c 'import socket; \
	    socket.create_server(("$(HOST)", $(PORT)), family=socket.AF_INET6 if ":" in "$(HOST)" else socket.AF_INET)' 2>/dev/null) || \
	    { echo "error: Cannot listen on $(HOST):$(PORT). Stop what uses the port, or choose another with PORT="; exit 1; }
endef

$(VENV)/.serve: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(CHECK_PORT)
	@echo "Installing the tested versions of what Punica needs (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --disable-pip-version-check $(QUIET) -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.serve-gpu: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(CHECK_PORT)
	@echo "Installing the tested versions of what Punica needs, for a CPU and for an NVIDIA GPU (minutes the first time) ..."
	@$(BIN)/python -m pip install --disable-pip-version-check $(QUIET) -c constraints.txt -e '.[demo,gpu]'
	@touch $@ $(VENV)/.serve

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing the tested versions of what Punica and its tests need ..."
	@$(BIN)/python -m pip install --disable-pip-version-check $(QUIET) -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.serve
