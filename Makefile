# Everything runs from .venv, which `make install` creates; every target below makes it first when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test check bench chaos bench-sandbox soak clean

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
	for script in $(filter-out benchmarks/sandbox.py benchmarks/learning.py,$(wildcard benchmarks/[!_]*.py)); do $(BIN)/python $$script $(ARGS) || exit 1; done

# Beside peers: SWE-ReX in an environment of its own, and docker where an engine answers or can be started.
bench-sandbox: install
	.ci/services $(BIN)/python benchmarks/sandbox.py --swerex $(VENV)/swerex --install-swerex --json $(ARGS)

# Kills gateways, nodes, clients and sandboxes at random, for half an hour or so. SEED=1 makes other choices.
chaos: install
	SKYENV_CHAOS_KILLS=$(or $(KILLS),200) SKYENV_CHAOS_CYCLES=$(or $(CYCLES),1000) SKYENV_CHAOS_SEED=$(or $(SEED),0) \
		$(BIN)/python -m pytest tests/remote/test_chaos.py $(ARGS)

# Hundreds of rollouts while sandboxes, the node server and engines are killed under them; ends with one JSON line.
soak: install
	$(BIN)/python -m tests.rollout.soak --minutes $(or $(SOAK_MINUTES),10) --seed $(or $(SEED),0)

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache
