# Each target sets up what it needs: on a fresh machine, Python, pip and make are enough.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test check format demo clean

test: .venv/installed  ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --durations=10

check: .venv/installed  ## lint, format and type check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed  ## apply lint fixes and the formatter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: .venv/installed  ## train a small ViT on digits with and without SBP
	$(BIN)/python examples/demo.py

clean:  ## remove the virtual environment and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build *.egg-info

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install -e ".[dev]"
	touch $@
