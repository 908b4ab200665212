"""pytest plugin: a small cache service on Ray for a test, and faults in it by a marker.

    @pytest.mark.hicache_faults({"kind": "kill", "who": "rank 1", "step": 5})
    def test_it_heals(hicache_group):
        for prompt in prompts:
            ask(hicache_group, prompt)          # hicache_ray.testing.serving

Fixtures: `hicache_group`, `hicache_storage_pool`, `hicache_service` (the service of both), `fault_plan`,
`hicache_faults` (the plan on the service: what has happened so far). To change the service override `hicache_config`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hicache_ray.actors.group import TPGroup
    from hicache_ray.actors.storage_pool import StoragePool
    from hicache_ray.config import HiCacheConfig
    from hicache_ray.faults.plan import FaultPlan
    from hicache_ray.faults.service import ServiceFaults
    from hicache_ray.service import Service

MARKER = "hicache_faults"
OBJECT_STORE_BYTES = 150 << 20


def pytest_configure(config: pytest.Config) -> None:
    """Makes the marker known."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(*faults, seed=0, file=None): faults in the service of this test's hicache fixtures, as in a plan's "
        "file (hicache_ray.faults.plan), or that file",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the plan to work also in a test that asks for the service and for nothing in it."""
    for item in items:
        names = getattr(item, "fixturenames", [])
        if item.get_closest_marker(MARKER) and "hicache_service" in names and "hicache_faults" not in names:
            names.append("hicache_faults")


@pytest.fixture
def fault_plan(request: pytest.FixtureRequest) -> FaultPlan:
    """The plan that the test's markers make; empty without any."""
    from hicache_ray.faults.plan import FaultPlan, FaultPlanError

    faults: list[Any] = []
    seed = 0
    for marker in reversed(list(request.node.iter_markers(MARKER))):
        if unknown := set(marker.kwargs) - {"seed", "file"}:
            raise FaultPlanError(f"{MARKER} has {', '.join(sorted(unknown))}; it takes faults, seed and file")
        if file := marker.kwargs.get("file"):
            loaded = FaultPlan.load(request.path.parent / file)
            faults += [fault.as_mapping() for fault in loaded.faults]
            seed = loaded.seed
        faults += marker.args
        seed = marker.kwargs.get("seed", seed)
    return FaultPlan.parse({"faults": faults, "seed": seed})


@pytest.fixture(scope="session")
def hicache_ray() -> Iterator[None]:
    """A Ray cluster: the one this process is in, else a small one of its own for the session."""
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    folder = tempfile.mkdtemp(prefix="hicache")
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def hicache_config() -> HiCacheConfig:
    """Configuration of the test's service: two ranks, two storage actors, all tiers tiny, short deadlines."""
    from hicache_ray.config import HiCacheConfig

    return HiCacheConfig(
        model_name="test",
        layers=2,
        heads=2,
        head_dim=8,
        tp_size=2,
        page_size=4,
        l1_tokens=128,
        hicache_ratio=4.0,
        hicache_storage_backend="ray",
        storage_actors=2,
        storage_actor_size=0.02,
        hicache_storage_prefetch_policy="wait_complete",
        prefetch_threshold=4,
        host_memory_reserve=0.5,
        device="cpu",
        step_timeout=6.0,
        collective_timeout=3.0,
        storage_timeout=3.0,
    )


@pytest.fixture
def hicache_service(hicache_ray: None, hicache_config: HiCacheConfig) -> Iterator[Service]:
    """A service with one group, "instance-0", whose engine verifies every cached page."""
    from hicache_ray.replay.driver import ENGINE
    from hicache_ray.service import start

    service = start(hicache_config, name=f"test-{uuid.uuid4().hex[:8]}")
    try:
        service.group(engine=ENGINE)
        yield service
    finally:
        service.stop()


@pytest.fixture
def hicache_faults(hicache_service: Service, fault_plan: FaultPlan) -> Iterator[ServiceFaults]:
    """The test's plan, at work in the service: `firings()` tells what has happened at points."""
    from hicache_ray.faults.service import FaultRunner, ServiceFaults

    faults = ServiceFaults(hicache_service, fault_plan)
    if not fault_plan.faults:
        yield faults
        return
    runner = FaultRunner(faults)
    runner.start()
    try:
        yield faults
    finally:
        runner.stop()


@pytest.fixture
def hicache_group(hicache_service: Service, hicache_faults: ServiceFaults) -> TPGroup:
    """The service's group; faults are at work in it and in its storage."""
    return hicache_service.group()


@pytest.fixture
def hicache_storage_pool(hicache_service: Service, hicache_faults: ServiceFaults) -> StoragePool:
    """The service's storage pool; faults are at work in it."""
    pool = hicache_service.storage
    assert pool is not None, "this test's hicache_config has no storage backend 'ray'"
    return pool
