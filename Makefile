# Two commands do everything, set-up included: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Two at a time: many tests are of one process. Files stay whole; long tests are taken over from whoever has more left.
BY_FILE := -n 2 --dist loadfile --durations 20
BY_TEST := -n 2 --dist worksteal --durations 20

.PHONY: help install demo check docs test test-slow browser clean
help:
	@echo "make demo       train a small mixture of experts on four processes (resumes when run again)"
	@echo "make test       the tests (under 12 minutes on 2 cores)"
	@echo "make test-slow  the tests marked slow"
	@echo "make browser    Chromium for the tests of HTML pages (root and apt; part of make test-slow)"
	@echo "make check      ruff, mypy strict, layering, the documentation built strictly"
	@echo "make docs       the documentation as a site: open site/index.html"
	@echo "make install    the set-up alone: $(VENV) with all that the demo and the tests need"

install: $(STAMP)
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (once; about 2 GB with torch)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[hf,data,dev,docs]"
	@touch $(STAMP)

demo: install
	$(BIN)/lightning-moe demo

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py
	$(MAKE) --no-print-directory docs

# No network, and a broken link, anchor or docstring is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

test: install
	$(BIN)/python -m pytest -q -m "not slow" $(BY_FILE)

test-slow: install browser
	$(BIN)/python -m pytest -q -m slow $(BY_TEST)

# Where it cannot be installed, the tests of HTML pages skip and say so.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	{ test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } || \
	echo "no Chromium, and no root or apt to install it: the tests of HTML pages skip"

clean:
	rm -rf $(VENV) build dist site runs .pytest_cache .mypy_cache .ruff_cache *.egg-info
