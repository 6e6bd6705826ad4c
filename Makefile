# `make up` and `make test` are all a newcomer needs; both work on a fresh machine with Python 3.11+.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PROTOS := $(patsubst proto/%,shared/pb/%,$(wildcard proto/*.proto))
MODEL  ?= smollm2-135m-instruct

.PHONY: up test check fmt proto clean

up: $(VENV)/.installed ## install, fetch the default model, start the mesh
	@exec $(BIN)/orca up --model $(MODEL) $(ARGS)

# Tests of the first two levels compute little and wait much: some at a time, each with one core's threads that do not
# spin. Those of whole meshes have the machine to themselves.
test: check ## what CI runs: static checks, then all tests
	@.ci/browser
	$(BIN)/orca models pull $(MODEL)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/pytest --numprocesses auto --maxprocesses 4 tests/unit tests/service
	$(BIN)/pytest --ignore tests/unit --ignore tests/service

check: $(VENV)/.installed-dev ## formatting, lint, types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

fmt: $(VENV)/.installed-dev ## format and fix what can be fixed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# The virtual directory shared/pb=proto makes protoc write imports that need no patching.
proto: $(VENV)/.installed-dev ## regenerate shared/pb from proto
	$(BIN)/python -m grpc_tools.protoc -Ishared/pb=proto --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc $(PROTOS)

clean: ## remove what make made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV): takes a few minutes the first time"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV): takes a few minutes the first time"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.installed
