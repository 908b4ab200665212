# make demo and make test do all their own set-up: a machine needs Python 3.10 to 3.13, pip and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: demo test lint unit chaos bench clean install

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,plots]"
	@touch $(READY)

demo: $(READY)
	$(BIN)/hicache-ray demo

lint: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

test: $(READY) lint
	$(BIN)/python -m pytest -m "not chaos and not gpu" -q

unit: $(READY)
	$(BIN)/python -m pytest -m "not ray and not chaos and not gpu" -q

clean:
	rm -rf $(VENV) build *.egg-info
