# make demo | make test: each creates .venv when needed; nothing else to install.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test check docs bench soak format clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## create .venv and install natgrad with its extras into it

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "natgrad needs Python >= 3.11, not " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing natgrad and its extras into $(VENV): once, a few minutes.'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ./lab -e '.[dev,docs,integrations]'
	@touch $@

demo: $(STAMP) ## train on digits with SGD, KFAC, Polar and SPNGD, the last on two processes too
	$(BIN)/natgrad demo

check: $(STAMP) ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: check ## check, then every test
	$(BIN)/python -m pytest --durations=20

docs: $(STAMP) ## build the documentation into docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

bench: $(STAMP) ## time a step against SGD and peers, one process and two (under half an hour)
	$(BIN)/python -m benchmarks.step_time
	$(BIN)/python -m benchmarks.distributed

soak: $(STAMP) ## inject faults for an hour, in pieces that are not run twice; results in benchmarks/results
	PYTHONPATH=. $(BIN)/python -m tests.faults.soak

format: $(STAMP) ## apply the formatter and the safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and build products (runs/ stays)
	rm -rf $(VENV) build dist docs/_build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
