# make serve   set everything up, serve the default model on this machine, leave the endpoint up
# make test    every test that runs without a GPU
# make lint    style, types, architecture

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PORT   ?= 8000

.PHONY: serve test lint clean

serve: $(READY)
	exec $(BIN)/pdserve cluster --port $(PORT) \
		--ask "In one sentence: what is the capital of France?"

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_architecture.py

# The stamp is written last: an installation that was interrupted is made again.
$(READY): pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --editable ".[dev,gguf]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
