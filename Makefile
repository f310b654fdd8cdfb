# The commands of this project. Everything runs in .venv, which is made on first use.
# Where the python3 found here already has a good torch (one built for its accelerators, say), that one is kept.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready
INSTALL := $(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable

# Each rank and each command imports a hundred modules of ours: not to be compiled anew, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-versions package lint types docs pages pictures performance bench check-gpu bench-gpu clean

demo: $(RUNS)
	$(BIN)/lockstep train examples/digits.py --strategy ddp --devices 2

test: lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-all: lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal --timeout 600 --soak 1000

# A quick part of the tests with each Python from 3.11 to 3.13 and each torch from 2.11 to 2.13 that can be had here.
test-versions:
	$(PYTHON) tests/versions.py $(WORDS)

# The wheel and the sdist, in dist/, each tried in a new environment.
package: $(READY)
	rm -rf dist
	DIST=$(CURDIR)/dist $(BIN)/python -m pytest --timeout 900 tests/test_package.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# The site of docs/ and the README, in site/ (python -m http.server -d site). Links are checked; a reader fetches nothing else.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# What the blocks of these pages print, written into them anew: some minutes.
pages: $(READY)
	$(BIN)/python tests/docs_pages.py README.md docs/five-minutes.md docs/parallel.md docs/strategies/*.md

# The comparisons of docs/compare.md, measured anew, with their charts: about an hour; leave the machine alone.
pictures: $(READY)
	$(BIN)/python tests/docs_pages.py --pictures docs/compare.md

# docs/performance.md and its charts, from benchmarks/results: nothing is measured.
performance: $(READY)
	$(BIN)/python -m benchmarks page

bench: $(READY)
	$(BIN)/python -m benchmarks

# Nothing is installed: the machine's own torch (and pytest) run the code of this folder. What one accelerator shows, and
# two where there are two: the tests in some minutes, the benchmarks in under nine (WORDS=small, say, for one of them).
check-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests/test_gpu.py tests/parallel

bench-gpu:
	PYTHONPATH=src $(PYTHON) -m benchmarks gpu $(WORDS)

# What runs the package and examples/digits.py; then what the tests need, too.
$(RUNS): $(VENV)/constraints.txt pyproject.toml
	$(INSTALL) . scikit-learn
	@touch $@

$(READY): $(VENV)/constraints.txt pyproject.toml
	$(INSTALL) '.[dev]'
	@touch $(RUNS) $@

$(VENV)/.docs: $(VENV)/constraints.txt pyproject.toml
	$(INSTALL) '.[docs]'
	@touch $@

$(VENV)/constraints.txt: constraints.txt
	@if $(PYTHON) -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)' 2>/dev/null; then \
	  echo "keeping the torch that $(PYTHON) has"; \
	  $(PYTHON) -m venv --system-site-packages $(VENV) && \
	  grep -v '^torch==' constraints.txt > $@; \
	else \
	  $(PYTHON) -m venv $(VENV) && cp constraints.txt $@; \
	fi

clean:
	rm -rf $(VENV) .versions dist site .mypy_cache .ruff_cache .pytest_cache
