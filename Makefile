PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The text reaches the command as it was typed: neither make nor the shell reads it.
override TEXT := $(value TEXT)
export TEXT

.PHONY: demo test lint clean

demo: $(VENV)/installed
	$(BIN)/cpspec demo $(if $(TEXT),--text "$$TEXT")

# Each process of pytest takes up to 1.5 GB with TensorRT-RTX, and whoever has no tests left takes some of another's.
test: lint
	$(BIN)/pytest -q --numprocesses auto --maxprocesses 4 --dist worksteal

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info demo_out
