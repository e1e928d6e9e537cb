# Everything runs from .venv, which `make install` creates; every target below makes it first when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test check bench bench-sandbox clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: install
	$(BIN)/sky_trainer demo $(ARGS)

# Tests that need a service run where it can be had; .ci/services says which are left out. SERVICES=--all: that is an error.
test: install
	.ci/services $(SERVICES) $(BIN)/python -m pytest $(ARGS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: install
	for script in $(filter-out benchmarks/sandbox.py,$(wildcard benchmarks/[!_]*.py)); do $(BIN)/python $$script $(ARGS) || exit 1; done

# Beside peers: SWE-ReX in an environment of its own, and docker where an engine answers or can be started.
bench-sandbox: install
	.ci/services $(BIN)/python benchmarks/sandbox.py --swerex $(VENV)/swerex --install-swerex --json $(ARGS)

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache
