# Each target makes the environment it needs; `make test` works in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# threads that spin would slow down the other processes
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8

# Tests that depend on the order of floating-point sums, and settings that limit them to the
# instruction sets of older CPUs. PyTorch (ATen, MKL, oneDNN, fbgemm) and NumPy (OpenBLAS, used by
# Triton's interpreter) choose their kernels by instruction set.
NUMERICAL := tests/ops tests/model tests/engine tests/training tests/paper/test_listings.py
SSE := ATEN_CPU_CAPABILITY=default OPENBLAS_CORETYPE=Nehalem MKL_CBWR=COMPATIBLE \
       ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=1
AVX2 := ATEN_CPU_CAPABILITY=avx2 OPENBLAS_CORETYPE=Haswell MKL_CBWR=AVX2 \
        FBGEMM_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2

.PHONY: demo test test-other-cpus test-slow check sanitize clean

demo: $(VENV)/demo
	$(BIN)/writehead demo

test: $(VENV)/test
	$(PYTEST)

test-other-cpus: $(VENV)/test
	$(SSE) $(PYTEST) $(NUMERICAL)
	$(AVX2) $(PYTEST) $(NUMERICAL)

test-slow: $(VENV)/test
	$(PYTEST) -m slow

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

sanitize: $(VENV)/test
	$(BIN)/python tests/sanitize.py

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "writehead needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[test]'
	touch $@

$(VENV)/dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	touch $@
