# Every target makes its own virtual environment; all it needs is Python and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= auto
STUDIES := catalogue cfedavg fafed fedswa gradma

.PHONY: demo test lint smoke bench bench-methods bench-compressors qp-accuracy clean
.PHONY: $(STUDIES:%=%-study)

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

# What a round of each method costs next to FedAvg's, and each compressor next to a copy.
bench-methods bench-compressors: bench-%: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks.$*

# Accuracy of the quadratic program against scipy, two to seven minutes.
qp-accuracy: $(VENV)/.test
	$(BIN)/python -m experiments.qp_accuracy

# A paper's study on Fashion-MNIST: minutes to hours, see its RESULTS.md. An interrupted one goes on.
$(STUDIES:%=%-study): %-study: $(VENV)/.runtime
	$(BIN)/python -m experiments.$*.fashion_mnist
	$(BIN)/python -m experiments.$*.fashion_mnist --report runs/$*/fashion_mnist/machine-fashion_mnist.json

# Every study at its smallest, on digits, with its report in runs/smoke.
smoke: $(VENV)/.runtime
	for paper in $(STUDIES); do \
	  mkdir -p runs/smoke/$$paper && \
	  $(BIN)/python -m experiments.$$paper.fashion_mnist --scale smoke --out runs/smoke/$$paper.json && \
	  $(BIN)/python -m experiments.$$paper.fashion_mnist --report runs/smoke/$$paper.json \
	    --folder runs/smoke/$$paper > runs/smoke/$$paper.md || exit 1; \
	done

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
