# Baton's commands. `make` alone lists them.
#
#   make demo                              the whole path on the real model
#   make test                              the tests, under ten minutes on two cores
#   make setup PYTHON=/path/to/python3.11  when `python3` is older
#   make setup PIP_ARGS='--extra-index-url URL'   a CPU build of torch; README.md says from where
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

export TORCH_SPEC ?= torch==2.13.0
export PIP_ARGS ?=
BIN := .venv/bin
# Test processes running beside each other.
TEST_JOBS ?= 2
# More arguments for pytest: make test PYTEST_ARGS='-k blob'
PYTEST_ARGS ?=
CODE_DIRS := $(wildcard baton services tests bench examples scripts)
CXX_FILES = $(shell find native -name '*.cpp' -o -name '*.hpp' -o -name '*.h' 2>/dev/null)

# Run the tests that a marker expression selects. pytest leaves 5 when it selects none: that is a
# fact to report, not a failure, and asking first keeps "no tests ran" out of a passing run.
define run_marked
	status=0; $(BIN)/python -m pytest -q --collect-only -m "$(1)" >/dev/null || status=$$?; \
	if [ $$status -eq 5 ]; then echo "no test is marked: $(1)"; \
	else $(BIN)/python -m pytest -m "$(1)" $(PYTEST_ARGS); fi
endef

.PHONY: help
help: ## list the commands
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([^:]+):.*## /\1\t/' | expand -t 14

.PHONY: setup
setup: ## create .venv and install everything (instant when nothing changed)
	@scripts/setup.sh

.PHONY: model
model: setup ## fetch and verify the bundled model
	@$(BIN)/baton models pull smollm2

.PHONY: demo
demo: setup ## install, fetch the model, start the cluster, stream one answer, stop
	@$(BIN)/baton demo

.PHONY: up
up: setup ## run the whole cluster here until Ctrl-C
	@$(BIN)/baton up

.PHONY: down
down: setup ## stop a cluster started by `make up` in another terminal
	@$(BIN)/baton down

.PHONY: gen
gen: setup ## write the stubs under baton/api from protos/
	@$(BIN)/python scripts/gen_protos.py

.PHONY: fmt
fmt: setup ## format the code and apply safe fixes
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .
	@if [ -n "$(CXX_FILES)" ] && command -v clang-format >/dev/null; then clang-format -i $(CXX_FILES); fi

.PHONY: check
check: setup ## format, lint, types, import contracts, protos, stub drift
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy $(CODE_DIRS)
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/buf lint
	@$(BIN)/python scripts/gen_protos.py --check
	@if [ -z "$(CXX_FILES)" ]; then :; \
	elif command -v clang-format >/dev/null; then clang-format --dry-run --Werror $(CXX_FILES); \
	else echo "check: clang-format is not installed; the C++ format was not checked"; fi
	@if git rev-parse --verify -q origin/main >/dev/null && git ls-tree -d --name-only origin/main | grep -qx protos; \
	then $(BIN)/buf breaking --against '.git#ref=origin/main'; \
	else echo "check: no origin/main with protos to compare against; buf breaking was skipped"; fi

.PHONY: test
test: model ## the tests: under ten minutes on two cores
	@$(BIN)/python -m pytest -n $(TEST_JOBS) -m "not slow and not more and not cluster and not gpu" $(PYTEST_ARGS)
	@$(call run_marked,cluster and not slow and not more and not gpu)

.PHONY: test-all
test-all: model ## the tests and the slow ones, and those of a GPU where there is one
	@$(BIN)/python -m pytest -n $(TEST_JOBS) -m "not more and not cluster" $(PYTEST_ARGS)
	@$(call run_marked,cluster and not more)

.PHONY: test-more
test-more: model ## crash, drill and compose tests
	@$(call run_marked,more)

.PHONY: bench-%
bench-%: setup ## one benchmark: bench-NAME runs bench/NAME.py
	@test -f bench/$*.py || { echo "bench: there is no bench/$*.py; there are: $$(ls bench 2>/dev/null | xargs)" >&2; exit 1; }
	@$(BIN)/python bench/$*.py

.PHONY: ci
ci: ## what the gate runs
	@.ci/run
