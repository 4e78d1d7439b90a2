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
CODE_DIRS = $(shell find baton services tests bench examples scripts -name '*.py' 2>/dev/null | cut -d/ -f1 | sort -u)
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
demo: setup ## install, fetch the model, start the cluster, stream two answers, stop
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
	@$(BIN)/python scripts/gen_config_docs.py

.PHONY: fmt
fmt: setup ## format the code and apply safe fixes
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .
	@if [ -n "$(CXX_FILES)" ] && command -v clang-format >/dev/null; then clang-format -i $(CXX_FILES); fi

# Every check runs even when an earlier one fails: one call shows all there is to mend.
CHECKS := format lint types imports protos stubs cxx breaking
.PHONY: check $(CHECKS:%=check-%)
check: setup ## format, lint, types, import contracts, protos, stub drift
	@failed=(); for name in $(CHECKS); do $(MAKE) "check-$$name" || failed+=("$$name"); done; \
	if [ $${#failed[@]} -gt 0 ]; then echo "check: failed: $${failed[*]}" >&2; exit 1; fi; \
	echo "check: all passed"

check-format:
	@$(BIN)/ruff format --check .
check-lint:
	@$(BIN)/ruff check .
check-types:
	@$(BIN)/mypy $(CODE_DIRS)
check-imports:
	@$(BIN)/lint-imports --no-logo
check-protos:
	@$(BIN)/buf lint
check-stubs:
	@$(BIN)/python scripts/gen_protos.py --check
	@$(BIN)/python scripts/gen_config_docs.py --check
check-cxx:
	@if [ -z "$(CXX_FILES)" ]; then :; \
	elif command -v clang-format >/dev/null; then clang-format --dry-run --Werror $(CXX_FILES); \
	else echo "check: clang-format is not installed; the C++ format was not checked"; fi
# v1 only grows. Without a main branch that has protos there is nothing to compare with.
check-breaking:
	@if [ -n "$$(git ls-tree -d --name-only origin/main protos 2>/dev/null)" ]; \
	then $(BIN)/buf breaking --against '.git#ref=origin/main'; \
	else echo "check: origin/main has no protos to compare with; buf breaking was skipped"; fi

.PHONY: test
test: model ## the tests: under ten minutes on two cores
	@$(BIN)/python -m pytest -n $(TEST_JOBS) -m "not slow and not more and not cluster and not gpu" $(PYTEST_ARGS)
	@$(call run_marked,cluster and not slow and not more and not gpu)

.PHONY: test-all
test-all: model ## the tests and the slow ones, and those of a GPU where there is one
	@$(BIN)/python -m pytest -n $(TEST_JOBS) -m "not more and not cluster" $(PYTEST_ARGS)
	@$(call run_marked,cluster and not more)

.PHONY: test-more
test-more: model ## crash, drill and compose tests, and those of the ucx extra
	@$(call run_marked,more)
	@scripts/test_ucx.sh $(PYTEST_ARGS)

.PHONY: test-compose
test-compose: setup ## the cluster of docker-compose.yml on a real container engine
	@scripts/compose_test.sh

.PHONY: bench-%
bench-%: setup ## one benchmark: bench-NAME runs bench/NAME.py
	@test -f bench/$(subst -,_,$*).py || { echo "bench: there is no bench/$(subst -,_,$*).py; there are: $$(ls bench 2>/dev/null | xargs)" >&2; exit 1; }
	@$(BIN)/python -m bench.$(subst -,_,$*)

.PHONY: ci
ci: ## what the gate runs
	@.ci/run
