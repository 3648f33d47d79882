# make demo | test | test-models | test-pages | check | soak | mutants | docs | site | clean
# Everything goes into .venv; PYTHON=/path/to/python chooses the interpreter.

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
CASES ?= 1000000

.PHONY: demo test test-models test-pages check soak mutants docs site clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@echo 'make demo    multiply the weights of a real model, checked and measured (< 4 minutes)'
	@echo 'make test    install the development tools and run the tests'
	@echo 'make test-models  the tests with whole models of transformers (< 10 minutes)'
	@echo 'make test-pages   the tests of pages, examples and notebooks (< 10 minutes)'
	@echo 'make check   lint, format, types, import direction'
	@echo 'make soak    the long tests, damaged files, interrupts, and CASES=$(CASES) products'
	@echo 'make mutants plant faults one by one, and see that the tests that watch them fail'
	@echo 'make docs    rewrite the generated parts of the documents'
	@echo 'make site    build the documentation to browse and search offline'
	@echo 'make clean   remove .venv and everything generated'

demo test test-models test-pages: export PYTHONDONTWRITEBYTECODE =
# After each product OpenBLAS's helpers spin for 2^26 ticks before they sleep, here for 2^4: between
# many small products they would spin all the time. It is read where NumPy is imported.
test test-models test-pages: export OPENBLAS_THREAD_TIMEOUT = 4

$(VENV)/made:
	@python=$$(.ci/find-python) && echo "using $$python" && $$python -m venv $(VENV)
	@touch $@

# The stamps make the second run quick: pip is asked again only when pyproject.toml changes.
# Of ten thousand modules few are ever imported; those are compiled then and kept: a minute less.
$(VENV)/runtime: $(VENV)/made pyproject.toml
	@echo 'installing gemmule'
	@$(PIP) install --no-compile --no-warn-conflicts --editable '.[lab]'
	@touch $@

$(VENV)/dev: $(VENV)/made pyproject.toml
	@echo 'installing gemmule and the development tools'
	@$(PIP) install --no-compile --no-warn-conflicts --editable '.[dev]'
	@touch $@ $(VENV)/runtime

$(VENV)/models: $(VENV)/dev
	@echo 'installing transformers, PEFT and FastAPI'
	@$(PIP) install --no-compile --no-warn-conflicts --editable '.[models]'
	@touch $@

$(VENV)/pages: $(VENV)/models
	@echo 'installing Sphinx and what runs notebooks'
	@$(PIP) install --no-compile --no-warn-conflicts --editable '.[pages]'
	@touch $@

demo: $(VENV)/runtime
	$(VENV)/bin/gemmule demo

# A worker that crashed is not replaced: pytest-xdist waits for ever for what it still held.
test: $(VENV)/dev
	$(PY) -m pytest -n auto --dist loadfile --max-worker-restart 0 -m 'not soak' --ignore tests/models --ignore tests/pages

test-models: $(VENV)/models
	$(PY) -m pytest -n 2 --dist loadfile --max-worker-restart 0 tests/models

test-pages: $(VENV)/pages
	$(PY) -m pytest -n 2 --dist loadfile --max-worker-restart 0 tests/pages

check: $(VENV)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) -m pytest tests/repository/test_architecture.py

soak: $(VENV)/dev
	$(PY) -m pytest -m soak --timeout 0
	$(PY) tests/corruption.py
	$(PY) tests/scalars_campaign.py
	PYTHONPATH=tools $(PY) -m proofs --check --anew
	$(PY) tests/external_campaign.py
	$(PY) tests/environments_campaign.py
	$(PY) tests/corners_campaign.py
	$(PY) tests/interrupts_campaign.py
	$(PY) tests/calls_campaign.py --cases $(CASES)

# A fault that no test sees is printed at the end. SEED=number repeats the faults of a run.
mutants: $(VENV)/dev
	$(PY) tests/mutation.py --seconds 2250 $(if $(SEED),--seed $(SEED))

docs: $(VENV)/dev
	PYTHONPATH=tools $(PY) -m pages

site: $(VENV)/pages
	PYTHONPATH=tools $(PY) -m pages.site

clean:
	rm -rf $(VENV) build dist results .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
