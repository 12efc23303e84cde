# Two commands do everything, set-up included: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help install demo check test test-slow clean
help:
	@echo "make demo       train a small mixture of experts on four processes (resumes when run again)"
	@echo "make test       the tests (under 12 minutes on 2 cores)"
	@echo "make test-slow  the tests marked slow"
	@echo "make check      ruff, mypy strict, layering"
	@echo "make install    the set-up alone: $(VENV) with all that the demo and the tests need"

install: $(STAMP)
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (once; about 2 GB with torch)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[hf,data,dev]"
	@touch $(STAMP)

demo: install
	$(BIN)/lightning-moe demo

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py

test: install
	$(BIN)/python -m pytest -q -m "not slow"

test-slow: install
	$(BIN)/python -m pytest -q -m slow

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache *.egg-info
