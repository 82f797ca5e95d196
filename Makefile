# Every target makes its own virtual environment; all it needs is Python and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= auto

.PHONY: demo test lint bench qp-accuracy gradma-study clean

demo: $(VENV)/.runtime
	$(BIN)/python -m experiments.demo

test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What the machine gives: time of a round, mapping by mapping.
bench: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks.client_maps

# Accuracy of the quadratic program against scipy, two to seven minutes.
qp-accuracy: $(VENV)/.test
	$(BIN)/python -m experiments.qp_accuracy

# GradMA's Table 1 setting on Fashion-MNIST; over an hour.
gradma-study: $(VENV)/.runtime
	$(BIN)/python -m experiments.gradma.fashion_mnist --partition dirichlet:0.1 --out runs/gradma/0.1.json
	$(BIN)/python -m experiments.gradma.fashion_mnist --partition dirichlet:0.01 --out runs/gradma/0.01.json
	$(BIN)/python -m experiments.gradma.fashion_mnist --report runs/gradma/0.1.json runs/gradma/0.01.json

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "fedjax_lab needs Python 3.11 or later; set PYTHON=python3.x"'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[report]'
	touch $@

$(VENV)/.test: $(VENV)/.runtime
	$(INSTALL) --editable '.[report,data,test]'
	touch $@
