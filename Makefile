# make demo   set up, then train a model on four unlike workers beside the single device
# make test   set up, then pass all tests (make test-slow: what takes long; make test-all-cases: that in every case)
# make bench-trust        predicted against measured steps on emulated clusters (as root), into docs/trust.md
# make bench-cluster      hetspmd beside DDP, FSDP2 and one device (as root), into docs/cluster.md, README
# make bench-one-quota    the same where the processor that computes carries the messages, into docs/one-quota.md
# make bench-fits         hetspmd beside FSDP2 under limits of memory (as root), into docs/fits.md
# make bench-gpu          hetspmd on a GPU: its cost, unlike shares, predictions; into docs/gpu.md
# make docs   the API pages, made of the docstrings, into build/api/index.html
# make lint | bench | format | setup | clean

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
DEPENDENCIES := $(VENV)/.dependencies
EXTENSION := $(VENV)/.extension
LIBRARIES := $(VENV)/.libraries
RUST := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)
PYTHON_CODE := python tests examples benches docs/api
# Test processes; each holds its own torch, so more than eight gain little.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
# What one run has compiled of the tests, the next need not compile again.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) -q
# One thread per process: the tests and the workers of the demo share the cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test test-rust test-python test-slow test-all-cases lint docs format bench bench-trust bench-cluster bench-one-quota bench-fits bench-gpu clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: $(EXTENSION)

$(DEPENDENCIES): pyproject.toml constraints.txt scripts/setup.sh
	@scripts/setup.sh dependencies $(VENV)
	@touch $@

$(EXTENSION): $(DEPENDENCIES) $(RUST)
	@scripts/setup.sh extension $(VENV)
	@touch $@

demo: setup
	$(BIN)/python examples/digits.py

test: test-rust test-python

test-rust: setup
	cargo test --workspace --locked --quiet

test-python: setup
	$(PYTEST) -m "not slow"

$(LIBRARIES): $(DEPENDENCIES)
	@scripts/setup.sh libraries $(VENV)
	@touch $@

test-slow: setup $(LIBRARIES)
	$(PYTEST) -m slow

test-all-cases: setup $(LIBRARIES)
	$(PYTEST) -m slow --all-cases

lint: setup
	$(BIN)/ruff check $(PYTHON_CODE)
	$(BIN)/ruff format --check $(PYTHON_CODE)
	$(BIN)/mypy
	cargo fmt --all --check
	PYO3_PYTHON=$(abspath $(BIN))/python cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
	$(BIN)/python -m mypy.stubtest hetspmd._core

docs: setup
	$(BIN)/python -m sphinx -W --keep-going -q -E -d build/doctrees -b html docs/api build/api
	@echo "The API pages: build/api/index.html"

format:
	$(BIN)/ruff check --fix $(PYTHON_CODE)
	$(BIN)/ruff format $(PYTHON_CODE)
	cargo fmt --all

bench: setup
	@mkdir -p target/bench
	cargo bench --package hetspmd-search --bench search --locked
	$(BIN)/python benches/search.py --quick | tee target/bench/search.md
	$(BIN)/python benches/models_table.py | tee target/bench/models.md
	@echo "Results: target/criterion (the core's stages), target/bench/search.md, target/bench/models.md."
	@echo "The whole tables of docs/search.md: $(BIN)/python benches/search.py --write docs/search.md"

bench-trust: setup
	$(BIN)/python benches/trust --rounds 4 --write docs/trust.md

bench-cluster: setup
	$(BIN)/python benches/versus --write docs/cluster.md --readme README.md

bench-one-quota: setup
	$(BIN)/python benches/versus --one-quota --write docs/one-quota.md

bench-fits: setup
	$(BIN)/python benches/fits --write docs/fits.md

bench-gpu: setup
	$(BIN)/python benches/gpu --write docs/gpu.md

clean:
	rm -rf $(VENV) target build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f python/hetspmd/_core*.so
	find python tests examples benches -name __pycache__ -type d -prune -exec rm -rf {} +
