# Two commands for a new user: `make serve` and `make test`; both make the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build; a newer, unpinned torch would bring gigabytes of CUDA packages.
TORCH ?= torch==2.13.0

PIP := $(BIN)/python -m pip install --disable-pip-version-check

.PHONY: serve check test test-long lint format bench clean
serve: $(VENV)/.installed
	$(BIN)/helmsight serve

# Processes with a thread each, a file in one of them: the models are small, and tests of one file share theirs. One more than
# two processors: some tests wait for seconds to pass. Bytecode is kept, as they start many processes.
test: lint
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Before a commit: lint, types, and of the tests the nearest to what changed, for about a minute.
check: lint
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m tests.concerned -n 2 --dist loadfile

# What takes too long for each change: both commands in a clone with an environment of its own, clusters of Ray, a deployment
# as a stack, torchrun, and loops for old processors. An hour.
test-long: $(VENV)/.installed
	$(BIN)/python -m pytest -m long

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.run

$(VENV)/.installed: pyproject.toml
	@echo "Installing into $(VENV), once; this takes a few minutes. 1/3: the environment"
	@$(PYTHON) -m venv $(VENV)
	@echo "2/3: $(TORCH), the largest download"
	@$(PIP) "$(TORCH)"
	@echo "3/3: Helmsight and what else it needs"
	@$(PIP) --editable ".[test]"
	@touch $@
	@echo "Installed."

clean:
	rm -rf $(VENV) build *.egg-info
