PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The text reaches the command as it was typed: neither make nor the shell reads it.
override TEXT := $(value TEXT)
export TEXT

.PHONY: demo test lint clean

demo: $(VENV)/installed
	$(BIN)/cpspec demo $(if $(TEXT),--text "$$TEXT")

test: lint
	$(BIN)/pytest -q

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
