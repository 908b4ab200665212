# make demo and make test do all their own set-up: a machine needs Python 3.10 to 3.13, pip and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MOONCAKE := $(VENV)/.mooncake
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Tests wait more than they compute, so more of them run side by side than there are cores. The tests of a file stay in
# one process: they share what is slow to start.
JOBS ?= 3
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: install system-packages demo test lint unit random chaos soak bench clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[dev,plots]"
	@touch $(READY)

system-packages:
	@bash tools/system_packages.sh

# What the Mooncake tests need: a package without CUDA, and Debian's RDMA libraries. Without them they are skipped.
$(MOONCAKE): $(READY)
	@bash tools/system_packages.sh
	@$(PIP) -e ".[mooncake-cpu]" || echo "The Mooncake package can't be installed here: its tests are skipped."
	@touch $(MOONCAKE)

demo: $(READY)
	$(BIN)/hicache-ray demo

lint: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

test: $(MOONCAKE) lint
	$(PYTEST) -m "not chaos and not gpu"

unit: $(READY)
	$(PYTEST) -m "not ray and not chaos and not gpu"

# The random runs at their full length; make test plays a part of them.
random: $(READY)
	HICACHE_RANDOM_INDEX_SEQUENCES=10000 HICACHE_RANDOM_CACHE_SEQUENCES=2000 HICACHE_RANDOM_EVENT_SEQUENCES=400 \
		$(PYTEST) tests/test_index_random.py tests/test_cache_random.py tests/test_events_recorder.py

chaos: $(READY)
	$(BIN)/python -m pytest -m chaos -q
	$(BIN)/hicache-ray chaos --plan random --minutes 10 --seed 1

bench: $(READY)
	for name in tree hash copies storage backends step step_reduction; do $(BIN)/python benchmarks/$$name.py; done

soak: $(READY)
	$(BIN)/python benchmarks/soak.py

clean:
	rm -rf $(VENV) build *.egg-info
