"""The Ray cluster of the tests: one a test process, started at its first use and ended with it.

Tests that need a cluster of another shape, or that break one, take one of their own: `own_cluster`, or
`ray.cluster_utils.Cluster` after `end_shared_cluster`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10000,
    "health_check_failure_threshold": 5,
}
"""A node that was killed refuses connections: noticed after 2.5 s. One that is only starved has 10 s for an answer."""

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
"""One simulated node."""

NAMESPACE = "storage-test"
"""Ray namespace of this process, which other drivers of a test have to join to find its actors."""

_folder: str | None = None
"""Where the shared cluster keeps its files; None while there is none."""


@contextmanager
def shared_cluster() -> Iterator[None]:
    """This process is in the shared cluster; whatever the caller starts there, it has to stop."""
    global _folder
    if _folder is None:
        _folder = _start()
    yield


@contextmanager
def own_cluster(**options: Any) -> Iterator[None]:
    """This process is in a new cluster, which ends with the block; the shared one ends before."""
    end_shared_cluster()
    folder = _start(**options)
    try:
        yield
    finally:
        _end(folder)


@contextmanager
def simulated_nodes(nodes: int, *, head_cpus: float = 0) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` of a head and `nodes` more on this machine; a dead one is noticed in 3 s.

    Its address is not written where other programs of this machine would look for one.
    """
    import ray
    from ray.cluster_utils import Cluster

    end_shared_cluster()
    folder = tempfile.mkdtemp(prefix="hc", dir="/tmp")
    head = {**NODE, "num_cpus": head_cpus, "include_dashboard": False, "temp_dir": folder}
    head["_system_config"] = HEALTH_CHECKS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray._private.utils.write_ray_address", lambda *_: None)
        patch.setattr("ray._common.utils.reset_ray_address", lambda *_: None)
        running = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(nodes):
                running.add_node(**NODE)
            ray.init(address=running.address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
            yield running
        finally:
            ray.shutdown()
            running.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def end_shared_cluster() -> None:
    """Ends the shared cluster where there is one; its next use starts another."""
    global _folder
    folder, _folder = _folder, None
    if folder is not None:
        _end(folder)


def _start(**options: Any) -> str:
    import ray

    folder = tempfile.mkdtemp(prefix="hc", dir="/tmp")
    settings = {"num_cpus": 4, "object_store_memory": 200 << 20, "namespace": NAMESPACE, **options}
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=folder,
        **settings,
    )
    return folder


def _end(folder: str) -> None:
    import ray

    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
