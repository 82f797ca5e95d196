# Every target makes its own virtual environment; all it needs is Python and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OPPONENTS := $(VENV)/opponents
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= auto
# Bytecode is kept even where the shell says otherwise: without it, each worker of the tests compiles
# all of them anew, which takes 5 seconds.
export PYTHONDONTWRITEBYTECODE :=
STUDIES := catalogue cfedavg fafed fedspeed fedswa gradma

.PHONY: demo check test test-methods test-pretrained test-all test-gpu test-newest faults fuzz lint smoke docs notebooks wheel-check release qp-accuracy clean
.PHONY: accelerator-check
.PHONY: bench bench-opponents bench-maps bench-methods bench-systems bench-compressors bench-memory bench-nonfinite bench-sweep bench-clients bench-streams bench-wrappers bench-compile bench-collectives bench-links bench-same-bits bench-bits bench-latency bench-tuning bench-zoo
.PHONY: $(STUDIES:%=%-study) studies-report leaderboard

demo: $(VENV)/.runtime
	$(BIN)/python -m experiments.demo

# Style, types and the tests that mirror what has changed since a commit.
SINCE ?= HEAD
check: $(VENV)/.test
	$(BIN)/python -m tests.changed $(SINCE)

test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# The limits, options and transforms of the steps of every method against the twins, the wrappers, the
# client maps, stores and streams, of which `make test` has some, and here is the rest.
test-methods: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m methods

# The decoder, its weights and its adapters against transformers and peft, in an environment of their
# own (PyTorch for the CPU, about 1 GB).
test-pretrained: $(VENV)/pretrained/.installed
	$(VENV)/pretrained/bin/python -m pytest tests/models/test_peers.py

$(VENV)/pretrained/.installed: pyproject.toml tests/models/peers.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint tests/models/peers.txt --editable '.[peers]'
	touch $@

# Every method and option against its twin on a GPU, by an interpreter whose JAX has one (extras "cuda"
# and "test").
GPU_PYTHON ?= python3
test-gpu:
	XLA_PYTHON_CLIENT_PREALLOCATE=false FEDJAX_LAB_TEST_OPTIMIZED=1 FEDJAX_LAB_TEST_PROGRAMS=off \
	  FEDJAX_LAB_TEST_PLATFORM=cuda $(GPU_PYTHON) -m pytest --numprocesses $(WORKERS) \
	  --dist worksteal -W default -m 'methods or not slow' -k 'agrees_with_its_twin or test_options' \
	  tests/algorithms/test_contract.py tests/algorithms/test_twins.py

# Also every method under every map and compressor, and the examples of the documentation. With
# FEDJAX_LAB_TEST_OPTIMIZED=1 programs are compiled as users compile them, which takes hours.
test-all: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m ''

# The core on the newest releases that pyproject.toml allows, which pip takes without constraints,
# and on the newest Python that is here: JAX 0.11 needs 3.12. What only will be gone is no error.
NEWEST := $(VENV)/newest
PYTHONS ?= $(wildcard $(PYENV_ROOT)/versions/3.13*/bin/python3) python3.13 \
  $(wildcard $(PYENV_ROOT)/versions/3.12*/bin/python3) python3.12 $(PYTHON)
CORE := tests/machine tests/clients/test_planner.py tests/qp tests/simulation/test_team.py \
  tests/test_round.py tests/algorithms/test_contract.py
CORE_METHODS := fedavg fedadam scaffold feddyn mifa stem fedgamma fafed fedspeed fedmoswa moon gradma
LATER := -W default::DeprecationWarning -W default::PendingDeprecationWarning -W default::FutureWarning
test-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python -c 'import platform, jax, numpy; print("Python", platform.python_version(), "jax", jax.__version__, "numpy", numpy.__version__)'
	$(NEWEST)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(LATER) $(CORE) \
	  --methods $(CORE_METHODS)

$(NEWEST)/.installed: pyproject.toml
	for python in $(PYTHONS); do \
	  if $$python -c '' 2>/dev/null; then $$python -m venv --clear $(NEWEST); break; fi; \
	done
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[report,test]'
	touch $@

# Kill runs at 200 moments, damage 300 files of half-finished ones, and compare what comes out.
KILLS ?= 200
MUTATIONS ?= 300
faults: $(VENV)/.test
	$(BIN)/python -m tests.faults --kills $(KILLS) --mutations $(MUTATIONS)

# Damaged settings, data and messages: an error that is meant, or a value. So long for each kind.
SECONDS ?= 10
fuzz: $(VENV)/.test
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Throughput next to PyTorch and pfl, half an hour; what is not installed is named and left out. All
# measurements are stored; `python -m experiments.benchmarks.page_figures` writes the pages from them.
bench: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks --json experiments/benchmarks/cpu.json \
	  $(if $(wildcard $(OPPONENTS)/.installed),--torch-python $(OPPONENTS)/bin/python)

# PyTorch and pfl for `make bench`, in an environment of their own, because pfl excludes chex.
bench-opponents: $(OPPONENTS)/.installed

$(OPPONENTS)/.installed: experiments/benchmarks/opponents.txt
	$(PYTHON) -m venv $(OPPONENTS)
	$(OPPONENTS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

# Networks as users of flax, equinox and haiku write them (the last two where they are installed),
# beside PyTorch.
bench-zoo: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks.zoo --json experiments/benchmarks/zoo.json \
	  $(if $(wildcard $(OPPONENTS)/.installed),--torch-python $(OPPONENTS)/bin/python)

# Time of a round mapping by mapping, of each method and of the five systems next to FedAvg's, of
# each compressor next to a copy; memory as the cohort grows; what leaving out broken clients costs;
# a sweep next to its runs one by one; rounds and memory as the number of clients grows; examples on
# the host next to examples on the device; what devices exchange in a round.
bench-maps: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks.client_maps

bench-methods bench-systems bench-compressors bench-memory bench-nonfinite bench-sweep bench-clients bench-streams bench-wrappers bench-collectives bench-links bench-tuning: bench-%: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks.$*

# Processor seconds up to the first row of README's quick start, and what each part of it compiles to.
bench-latency: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks.latency --parts --origins \
	  $(if $(wildcard $(OPPONENTS)/.installed),--torch-python $(OPPONENTS)/bin/python)

# Seven methods on eight CPU devices in one, two and four processes, with each store of client rows:
# fails if they do not end with the same bits.
bench-same-bits: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks.same_bits

# The bits that every method ends with, to compare those before a restructuring with those after it.
AGAINST ?=
bench-bits: $(VENV)/.runtime
	mkdir -p build
	$(BIN)/python -m experiments.benchmarks.bits --out build/bits.json \
	  $(if $(AGAINST),--against $(AGAINST))

# What compilers make of GradMA and top-k next to FedAvg; TARGET=v5e where jax[tpu] is installed.
TARGET ?= cpu
bench-compile: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks.compile_time --target $(TARGET)

# All programs compiled for a TPU and a GPU by their own compilers, in an environment for each (about
# 3 GB); it needs neither. Hours; what has a row is not compiled again. SUBSET=ci: four programs for
# each, kept nowhere; fails if one does not compile.
SUBSET ?= all
accelerator-check: $(VENV)/tpu/.installed $(VENV)/cuda/.installed
	$(VENV)/tpu/bin/python -m experiments.benchmarks.accelerators --target v5e --subset $(SUBSET)
	$(VENV)/cuda/bin/python -m experiments.benchmarks.accelerators --target h200 --subset $(SUBSET)
	if [ $(SUBSET) = all ]; then $(VENV)/tpu/bin/python -m experiments.benchmarks.accelerators --table; fi

# The plugin of the extra "cuda", without NVIDIA's libraries, which only a GPU needs.
$(VENV)/tpu/.installed: ACCELERATOR = jax[tpu]
$(VENV)/cuda/.installed: ACCELERATOR = jax-cuda12-plugin jax-cuda12-pjrt
$(VENV)/tpu/.installed $(VENV)/cuda/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --editable . '$(firstword $(ACCELERATOR))' $(wordlist 2,9,$(ACCELERATOR))
	touch $@

# Accuracy of the quadratic program against scipy, three to ten minutes; where Debian's
# dataset-fashion-mnist is installed also of those that GradMA solves.
qp-accuracy: $(VENV)/.test
	$(BIN)/python -m experiments.qp.accuracy \
	  $(if $(wildcard /usr/share/datasets/fashion-mnist),--recorded 40)

# A paper's studies as far as two CPU cores manage them in minutes to hours, and their report. An
# interrupted one goes on. `python -m experiments.PAPER --list` says what there is.
$(STUDIES:%=%-study): %-study: $(VENV)/.runtime
	$(BIN)/python -m experiments.$*
	$(BIN)/python -m experiments.$* --report

# Epsilon against accuracy, and robust rules under attacks; `--report` writes their pages anew.
privacy-study robustness-study: %-study: $(VENV)/.test
	$(BIN)/python -m experiments.$*

# The cells of the leaderboard that have not been run, and its page.
leaderboard: $(VENV)/.runtime
	$(BIN)/python -m experiments.leaderboard

# All RESULTS.md and the summary of the claims, from the kept results alone. A difference from what is
# committed is an error, and so is a number of a discussion that is none of results or settings.
studies-report: $(VENV)/.runtime
	for paper in $(STUDIES); do \
	  $(BIN)/python -m experiments.$$paper --report --runs build/none || exit 1; \
	done
	$(BIN)/python -m experiments.studies.summary
	$(BIN)/python -m experiments.studies.numbers
	for study in privacy robustness; do \
	  $(BIN)/python -m experiments.$$study --report || exit 1; \
	done
	$(BIN)/python -m experiments.leaderboard --report
	git diff --stat --exit-code -- 'experiments/*/RESULTS.md' docs/papers_and_codes.md docs/leaderboard.md

# Every study at its smallest, with its report in runs/smoke. What is finished would not be run.
smoke: $(VENV)/.runtime
	rm -rf runs/smoke
	for paper in $(STUDIES); do \
	  $(BIN)/python -m experiments.$$paper --scale smoke --runs runs/smoke && \
	  $(BIN)/python -m experiments.$$paper --scale smoke --runs runs/smoke \
	    --report --out runs/smoke/$$paper || exit 1; \
	done

# The notebooks for researchers, small; the first also on eight CPU devices.
notebooks: $(VENV)/.notebooks
	$(BIN)/python -m experiments.notebooks.run
	$(BIN)/python -m experiments.notebooks.run --devices 8 quick_start_tpu

# The wheel's content, its first commands, and ten tasks, in a new environment outside the checkout.
wheel-check:
	$(PYTHON) tests/packaging/check_wheel.py

# The documentation, as HTML in build/docs; a warning is an error. Its examples are run, too.
docs: $(VENV)/.docs $(VENV)/.test
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html -d build/doctrees docs build/docs
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m example tests/docs tests/experiments tests/recipes

# The wheel and the source archive of a tag, into dist/; HOME_URL is where the repository lives.
release:
	$(PYTHON) tests/packaging/release.py --tag $(TAG) $(if $(HOME_URL),--home $(HOME_URL))

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "fedjax_lab needs Python 3.11 or later; set PYTHON=python3.x"'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[report]'
	touch $@

$(VENV)/.notebooks: $(VENV)/.runtime
	$(INSTALL) --editable '.[notebooks]'
	touch $@

$(VENV)/.docs: $(VENV)/.runtime
	$(INSTALL) --editable '.[report,docs]'
	touch $@

$(VENV)/.test: $(VENV)/.runtime
	$(INSTALL) --editable '.[report,data,test]'
	touch $@
