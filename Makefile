# Every target makes its own virtual environment; all it needs is Python and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OPPONENTS := $(VENV)/opponents
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= auto
STUDIES := catalogue cfedavg fafed fedswa gradma

.PHONY: demo test lint smoke qp-accuracy clean
.PHONY: bench bench-opponents bench-maps bench-methods bench-systems bench-compressors bench-memory bench-sweep
.PHONY: $(STUDIES:%=%-study)

demo: $(VENV)/.runtime
	$(BIN)/python -m experiments.demo

test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Throughput next to PyTorch and pfl, half an hour; what is not installed is named and left out.
bench: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks \
	  $(if $(wildcard $(OPPONENTS)/.installed),--torch-python $(OPPONENTS)/bin/python)

# PyTorch and pfl for `make bench`, in an environment of their own, because pfl excludes chex.
bench-opponents: $(OPPONENTS)/.installed

$(OPPONENTS)/.installed: experiments/benchmarks/opponents.txt
	$(PYTHON) -m venv $(OPPONENTS)
	$(OPPONENTS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

# Time of a round mapping by mapping, of each method and of the five systems next to FedAvg's, of
# each compressor next to a copy; memory as the cohort grows; a sweep next to its runs one by one.
bench-maps: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks.client_maps

bench-methods bench-systems bench-compressors bench-memory bench-sweep: bench-%: $(VENV)/.runtime
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
