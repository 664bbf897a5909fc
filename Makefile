PYTHON ?= python3
VENV ?= .venv
# A Django line to test against, such as 6.1; empty: the newest that the interpreter can have.
DJANGO ?=

BIN = $(VENV)/bin
RUN = $(BIN)/python
STAMP = $(VENV)/.installed$(DJANGO)
DJANGO_PIN = $(if $(DJANGO),'Django~=$(DJANGO).0')

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo serve install test check lint types imports migrations docs fmt coverage clean

help: ## Show what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP) ## Work through the standard library on a real queue, with a killed worker
	$(RUN) testproject/manage.py demo

serve: $(STAMP) ## Open the admin on what the demo left
	$(RUN) testproject/manage.py serve

install: $(STAMP) ## Make the virtual environment and install everything into it

test: $(STAMP) ## Run the tests on memory, SQLite and PostgreSQL
	$(RUN) -m pytest $(ARGS)

check: lint types imports migrations docs test ## The gate: everything that must pass before a change is done

lint: $(STAMP) ## Style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy --strict on the package
	$(BIN)/mypy

imports: $(STAMP) ## The package's imports run downward only
	$(BIN)/lint-imports

migrations: $(STAMP) ## No model change without a migration
	$(RUN) testproject/manage.py makemigrations --check --dry-run

docs: $(STAMP) ## Build the documentation; a warning is an error
	$(RUN) -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html

fmt: $(STAMP) ## Format the code and repair what can be repaired
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: $(STAMP) ## Run the tests and report the lines and branches they miss
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

clean: ## Remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist docs/_build htmlcov .coverage .coverage.* .nox
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "This needs Python 3.11 or newer, and '$(PYTHON)' is not. Name one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); \
	  echo "'$(PYTHON)' can't make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2; \
	  exit 1; }

$(STAMP): pyproject.toml | $(BIN)/python
	@rm -f $(VENV)/.installed*
	@echo "Installing into $(VENV); the first time this takes a minute or two"
	@$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[binary,dev]' $(DJANGO_PIN)
	@touch $@
