# Every target makes its own virtual environment; all it needs is Python and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OPPONENTS := fedjax fedlab flower pfl torch
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= auto
# Bytecode is kept even where the shell says otherwise: without it, each worker of the tests compiles
# all of them anew, which takes 5 seconds.
export PYTHONDONTWRITEBYTECODE :=
STUDIES := catalogue cfedavg fafed fedspeed fedswa gradma

.PHONY: help demo check test test-methods test-pretrained test-gpu test-all test-newest faults fuzz lint docs notebooks \
  wheel-check paper-tasks release qp-accuracy smoke leaderboard studies-report clean accelerator-check \
  bench bench-opponents bench-against bench-zoo bench-latency bench-methods bench-wrappers bench-sweep bench-memory \
  bench-clients bench-streams bench-tuning bench-collectives bench-same-bits bench-bits
.PHONY: $(STUDIES:%=%-study) privacy-study robustness-study theory-study natural-study

## make help: this list
help:
	@sed -n 's/^## //p' Makefile

## make demo: FedAvg, SCAFFOLD and GradMA on non-iid digits; a table and figures in runs/demo/report
demo: $(VENV)/.runtime
	$(BIN)/python -m experiments.demo

## make check: style, types, and the tests of the files changed since the last commit, or since SINCE=main
SINCE ?= HEAD
check: $(VENV)/.test
	$(BIN)/python -m tests.changed $(SINCE)

## make test: the test suite, on all cores
test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

## make test-methods: further cases of the tests of make test: every method, wrapper, client map and store, and
##     the tests of the NumPy twins
test-methods: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m 'methods and not slow and not example'

## make test-pretrained: the decoder, its weights and its adapters against transformers and peft, in an
##     environment of their own (PyTorch for the CPU, about 1 GB)
test-pretrained: $(VENV)/pretrained/.installed
	$(VENV)/pretrained/bin/python -m pytest tests/models/test_peers.py

$(VENV)/pretrained/.installed: pyproject.toml tests/models/peers.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint tests/models/peers.txt --editable '.[peers]'
	touch $@

## make test-gpu: every method and option against its NumPy twin on a GPU; GPU_PYTHON names an interpreter
##     that has the extras "cuda" and "test"
GPU_PYTHON ?= python3
test-gpu:
	XLA_PYTHON_CLIENT_PREALLOCATE=false FEDJAX_LAB_TEST_OPTIMIZED=1 FEDJAX_LAB_TEST_PROGRAMS=off \
	  FEDJAX_LAB_TEST_PLATFORM=cuda $(GPU_PYTHON) -m pytest --numprocesses $(WORKERS) \
	  --dist worksteal -W default -m 'methods or not slow' -k 'agrees_with_its_twin or test_options' \
	  tests/algorithms/test_contract.py tests/algorithms/test_twins.py

## make test-all: all tests, with every method under every client map and compressor, and the examples of the
##     documentation; FEDJAX_LAB_TEST_OPTIMIZED=1 compiles as users do, which takes hours
test-all: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m ''

## make test-newest: the core tests on the newest releases that pyproject.toml allows and the newest installed
##     Python; rm -r .venv/newest first for the releases of today
# JAX 0.11 needs Python 3.12. A warning that something will be removed later is not an error here.
NEWEST := $(VENV)/newest
PYTHONS ?= $(wildcard $(PYENV_ROOT)/versions/3.13*/bin/python3) python3.13 \
  $(wildcard $(PYENV_ROOT)/versions/3.12*/bin/python3) python3.12 $(PYTHON)
CORE := tests/machine tests/clients/test_planner.py tests/qp tests/simulation/test_processes.py \
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

## make faults: kill runs at 200 moments and damage 300 files of unfinished runs; the results must not change
KILLS ?= 200
MUTATIONS ?= 300
faults: $(VENV)/.test
	$(BIN)/python -m tests.faults --kills $(KILLS) --mutations $(MUTATIONS)

## make fuzz: read damaged settings, data files and messages; each must be read or refused with a clear error.
##     SECONDS for each kind
SECONDS ?= 10
fuzz: $(VENV)/.test
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

## make lint: ruff and mypy
lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## make bench: milliseconds a round next to FedJAX, Flower, FedLab, pfl-research and PyTorch, stored in
##     experiments/benchmarks/cpu.json after each sample; python -m experiments.benchmarks.page_figures then writes
##     the pages; hours
bench: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks --json experiments/benchmarks/cpu.json

## make bench-opponents: install what the benchmarks compare with, each in an environment of its own; one that cannot
##     be installed is named, and left out
.PHONY: $(OPPONENTS:%=opponent-%)
bench-opponents: $(OPPONENTS:%=opponent-%)

# A failure is no error: the others are installed all the same, and the next call tries again.
$(OPPONENTS:%=opponent-%): opponent-%: experiments/benchmarks/opponents/%.txt
	@[ $(VENV)/opponents-$*/.installed -nt $< ] || \
	{ $(PYTHON) -m venv --clear $(VENV)/opponents-$* && \
	$(VENV)/opponents-$*/bin/python -m pip install --quiet --disable-pip-version-check --requirement $< && \
	touch $(VENV)/opponents-$*/.installed; } || \
	echo "$* could not be installed and is left out; the lines above say why"

## make bench-zoo: networks as users of flax, equinox and haiku write them, next to PyTorch
bench-zoo: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks.zoo --json experiments/benchmarks/zoo.json

## make bench-against BEFORE=DIR: processor time of a round next to the package of an earlier checkout, both at once on
##     one core, so that other work on the machine does not matter: nothing has become slower
bench-against: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks.against $(BEFORE)

## make bench-methods, bench-wrappers: time of a round of the five papers' methods, and with each wrapper,
##     relative to FedAvg
## make bench-sweep: a sweep of 12 runs against 12 separate runs
## make bench-memory, bench-clients, bench-streams: memory as the cohort grows; time and memory as the number of
##     clients grows; examples on the host against examples on the device
## make bench-tuning: what ten searches of tune find, compared with a grid of 200 points
## make bench-collectives: bytes that devices exchange in a round, from compiled programs
bench-methods bench-wrappers bench-sweep bench-memory bench-clients bench-streams bench-tuning bench-collectives: bench-%: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks.$*

## make bench-latency: processor seconds up to the first row of README's quick start, and what its parts compile to
bench-latency: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks.latency --parts

## make bench-same-bits: fail unless seven methods end with the same bits on eight CPU devices in one, two and four
##     processes, with each store of client rows
bench-same-bits: $(VENV)/.runtime
	$(BIN)/python -m experiments.benchmarks.same_bits

## make bench-bits: hashes of the bits that every method ends with, in build/bits.json; AGAINST=FILE compares them
##     with earlier ones, to show that a refactoring changes no bits
AGAINST ?=
bench-bits: $(VENV)/.runtime
	mkdir -p build
	$(BIN)/python -m experiments.benchmarks.bits --out build/bits.json \
	  $(if $(AGAINST),--against $(AGAINST))

## make accelerator-check: compile all programs for a TPU and a GPU with their own compilers, without a TPU or GPU,
##     and write the tables of docs/accelerators.md; hours, resumable, 3 GB. SUBSET=ci: four programs for each
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

## make qp-accuracy: the quadratic program against scipy, on random, degenerate and recorded problems; minutes
qp-accuracy: $(VENV)/.test
	$(BIN)/python -m experiments.qp.accuracy \
	  $(if $(wildcard /usr/share/datasets/fashion-mnist),--recorded 40)

## make gradma-study, fedswa-study, fedspeed-study, fafed-study, cfedavg-study, catalogue-study: a paper's studies
##     at the scale of two CPU cores, and their report; an interrupted study resumes.
##     python -m experiments.PAPER --list lists studies and scales
$(STUDIES:%=%-study): %-study: $(VENV)/.runtime
	$(BIN)/python -m experiments.$*
	$(BIN)/python -m experiments.$* --report

## make privacy-study, robustness-study, theory-study, natural-study: accuracy against epsilon; robust rules under
##     attacks; the papers' convergence theorems as slopes; Shakespeare's roles, whose texts are downloaded
privacy-study robustness-study theory-study natural-study: %-study: $(VENV)/.test
	$(BIN)/python -m experiments.$*

## make leaderboard: run the cells of the leaderboard that are missing, and write its page
leaderboard: $(VENV)/.runtime
	$(BIN)/python -m experiments.leaderboard

## make studies-report: write every report from the stored results; fail if a byte differs from what is committed,
##     or if a discussion has a number that is neither a result nor a setting
studies-report: $(VENV)/.runtime
	for paper in $(STUDIES); do \
	  $(BIN)/python -m experiments.$$paper --report --runs build/none || exit 1; \
	done
	$(BIN)/python -m experiments.studies.summary
	$(BIN)/python -m experiments.studies.numbers
	for study in privacy robustness theory natural; do \
	  $(BIN)/python -m experiments.$$study --report || exit 1; \
	done
	$(BIN)/python -m experiments.leaderboard --report
	git diff --stat --exit-code -- 'experiments/*/RESULTS.md' docs/papers_and_codes.md docs/leaderboard.md docs/leaderboard docs/images/leaderboard.svg

## make smoke: every study at its smallest, with its report, in runs/smoke
smoke: $(VENV)/.runtime
	rm -rf runs/smoke
	for paper in $(STUDIES); do \
	  $(BIN)/python -m experiments.$$paper --scale smoke --runs runs/smoke && \
	  $(BIN)/python -m experiments.$$paper --scale smoke --runs runs/smoke \
	    --report --out runs/smoke/$$paper || exit 1; \
	done

## make notebooks: run the notebooks, small; the first also on eight CPU devices
notebooks: $(VENV)/.notebooks
	$(BIN)/python -m experiments.notebooks.run
	$(BIN)/python -m experiments.notebooks.run --devices 8 quick_start_tpu

## make wheel-check: build the wheel, list its contents, and do ten tasks of a new user with it
wheel-check:
	$(PYTHON) tests/packaging/check_wheel.py

## make paper-tasks: the same with ten tasks on the way from a question to a paper's table
paper-tasks:
	$(PYTHON) tests/packaging/check_wheel.py --papers

## make docs: build the documentation in build/docs, with warnings as errors, and run its examples
docs: $(VENV)/.docs $(VENV)/.test
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html -d build/doctrees docs build/docs
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m example tests/docs tests/recipes

## make release TAG=v0.4.0: the wheel and the source archive of a tag, in dist/; HOME_URL is the repository's address
release:
	$(PYTHON) tests/packaging/release.py --tag $(TAG) $(if $(HOME_URL),--home $(HOME_URL))

## make clean: delete the environments and all build outputs
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
