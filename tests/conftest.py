"""Settings every test runs under: they must be in the environment before ray or torch is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import pytest
from hypothesis import HealthCheck, settings

# Drawn alike in every run, and judged by what is found, not by how long it takes on a busy machine.
settings.register_profile(
    "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("search", settings.get_profile("steady"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

REPOSITORY = Path(__file__).resolve().parent.parent


def shared_folder() -> Path | None:
    """Folder with the recorded traces, or None: `HICACHE_SHARED`, else `shared` beside the repository."""
    for candidate in (os.environ.get("HICACHE_SHARED"), REPOSITORY.parent / "shared"):
        if candidate and Path(candidate).is_dir():
            return Path(candidate)
    return None


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of recorded traces; the test is skipped where it is absent."""
    folder = shared_folder()
    if folder is None:
        pytest.skip("recorded traces not found: set HICACHE_SHARED to their folder")
    return folder


def pytest_sessionfinish() -> None:
    """Ends the Ray cluster that this process's tests shared."""
    if "tests.cluster" in sys.modules:
        sys.modules["tests.cluster"].end_shared_cluster()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start Ray come first: they wait more than they compute, and others fill the time (xdist)."""
    slow = {item.path for item in items if item.get_closest_marker("ray")}
    items.sort(key=lambda item: item.path not in slow)
