# make demo | make test: each creates .venv when needed; nothing else to install.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo quick quick-tests test-library test-lab test-gpu test-processes test test-all durations \
	check lint types docs dist bench mutations soak format clean

# Tests start hundreds of processes: each would compile every file again.
unexport PYTHONDONTWRITEBYTECODE

# All cores; tests that share a fixture stay on one of them, the longest go first.
WORKERS ?= auto
PARALLEL := -q --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest $(PARALLEL)

# An environment with torch and the tools alone; TORCH='torch==2.14.*' for another one.
ALONE := .venv-library
TORCH ?= $(shell grep '^torch==' constraints.txt)

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## create .venv and install natgrad with its extras into it

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "natgrad needs Python >= 3.11, not " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing natgrad and its extras into $(VENV): once, a few minutes.'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,docs,integrations]' -e ./lab
	@touch $@

$(ALONE)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ALONE)
	grep -v '^torch==' constraints.txt > $(ALONE)/constraints.txt
	$(ALONE)/bin/python -m pip install --quiet -c $(ALONE)/constraints.txt '$(TORCH)' -e '.[dev]'
	@touch $@

demo: $(STAMP) ## train six optimizers on three small tasks, then one of them on two processes
	$(BIN)/natgrad demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

check: lint types ## lint, formatting and types

quick: lint ## lint, types, and the tests that need neither processes nor half a second
	@$(MAKE) --no-print-directory -j2 types quick-tests

quick-tests: $(STAMP)
	$(PYTEST) -m 'not processes and not slow and not long'

test-library: $(ALONE)/.installed ## the library's tests, where the lab is not installed
	$(ALONE)/bin/python -m pytest $(PARALLEL) tests/library

test-lab: $(STAMP) ## the tests of the lab, of faults and of integrations
	$(PYTEST) tests/lab tests/faults tests/integrations

test-gpu: $(STAMP) ## the tests that need CUDA, one worker; skipped where there is none
	$(BIN)/python -m pytest -q -m gpu tests/library tests/lab

# Not TORCH_DISTRIBUTED_DEBUG=DETAIL itself, which crashes DDP: tests/support/world.py.
test-processes: $(STAMP) ## the tests that start processes, with torch.distributed's own checks
	TESTS_CHECK_COLLECTIVES=1 $(PYTEST) -m 'processes and not long'

test: check ## check, then every test but the long ones
	$(PYTEST) --durations=20

test-all: check ## every test, the long ones too, with torch.distributed's own checks
	TESTS_CHECK_COLLECTIVES=1 $(PYTEST) -m '' --durations=20

durations: $(STAMP) ## write tests/durations.json, which says what is slow (on a quiet machine)
	$(PYTEST) -m '' --write-durations

docs: $(STAMP) ## build the documentation into docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

dist: $(STAMP) ## build both distributions into dist/, and try the library in an empty environment
	rm -rf dist build/empty
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m build --no-isolation --outdir dist lab
	$(BIN)/twine check --strict dist/*
	test -z '$(TAG)' || ls dist/natgrad-$(TAG:v%=%).tar.gz  # a tag is the version it names
	$(PYTHON) -m venv build/empty
	time build/empty/bin/python -m pip install --quiet -c constraints.txt dist/natgrad-*.whl
	time build/empty/bin/python -I -c 'import natgrad; print(natgrad.__version__)'
	ls -l dist

bench: $(STAMP) ## time a step against SGD and peers, one process and two (under half an hour)
	$(BIN)/python -m benchmarks.step_time
	$(BIN)/python -m benchmarks.distributed

mutations: $(STAMP) ## break the library in ten ways and see whether the quick tests notice
	$(BIN)/python -m tests.mutations

soak: $(STAMP) ## inject faults for an hour, in pieces that are not run twice; results in benchmarks/results
	PYTHONPATH=. $(BIN)/python -m tests.faults.soak

format: $(STAMP) ## apply the formatter and the safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and build products (runs/ stays)
	rm -rf $(VENV) $(ALONE) build dist docs/_build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
