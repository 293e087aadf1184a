# Everything a person or CI runs. Needs make and a Python of 3.10 or newer, nothing else.
.PHONY: demo test check bench clean

VENV := .venv
BIN := $(VENV)/bin
# The first interpreter that is new enough; choose another one with `make test PYTHON=python3.12`.
PYTHON ?= $(shell for p in python3 python python3.13 python3.12 python3.11 python3.10; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$$p" && break; done)
# One thread per process: the tests run in two processes, and matrices are small.
ONE_THREAD := OMP_NUM_THREADS=1

demo: $(VENV)/.ready-demo
	$(BIN)/python -m curvops

test: $(VENV)/.ready-test
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2

check: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(ONE_THREAD) $(BIN)/python -m pytest -n 0 -q test/test_floors.py

bench: $(VENV)/.ready-bench
	$(BIN)/python bench/correctness.py --write
	$(BIN)/python bench/kfac.py --write
	$(BIN)/python bench/ekfac.py --write
	$(BIN)/python bench/matrix_free.py --write
	$(BIN)/python bench/optim.py --write

# One stamp per extra: set-up is repeated only when what it installs has changed.
$(VENV)/.ready-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python of 3.10 or newer found: install one, or name it with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist *.egg-info curvops-demo
