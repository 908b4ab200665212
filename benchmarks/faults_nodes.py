"""What the loss of a node and of a driver does: the rows of docs/reliability.md that need a cluster.

    python benchmarks/faults_nodes.py [--json FILE]       # about a minute

Nodes are raylets on this machine, a head and two more, with Ray's default health checks; pages travel through the
object store and lie on two storage actors each (`storage_replicas=2`). Exit code 1 when what was in L3 is no hit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# This folder comes first on the path of a script, where its file names would hide modules of the standard library.
FOLDER = Path(__file__).resolve().parent
sys.path[:] = [str(FOLDER.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER)]
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^A worker died or was killed|^The node with node id")

import numpy as np  # noqa: E402
import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

import hicache_ray  # noqa: E402
from hicache_ray.actors.group import GroupOptions, TPGroup  # noqa: E402
from hicache_ray.config import HiCacheConfig  # noqa: E402
from hicache_ray.faults.chaos import tell_when_noticed  # noqa: E402
from hicache_ray.rank.group import GroupError  # noqa: E402
from hicache_ray.replay.driver import ENGINE, settle  # noqa: E402
from hicache_ray.service import Service  # noqa: E402
from hicache_ray.testing.serving import ask, wait_for  # noqa: E402

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
PROMPTS = [np.arange(64, dtype="<u4") + 1000 * number for number in range(8)]
SECONDS = 180.0
SERVED = 50
"""Requests that a driver serves before it is killed."""
CONFIG = HiCacheConfig(
    tp_size=2,
    layers=2,
    heads=2,
    head_dim=8,
    page_size=16,
    l1_tokens=256,
    hicache_ratio=3.0,
    hicache_storage_backend="ray",
    storage_actors=3,
    storage_replicas=2,
    storage_actor_size=0.02,
    hicache_storage_prefetch_policy="wait_complete",
    prefetch_threshold=16,
    host_memory_reserve=0.5,
    device="cpu",
)
DRIVER = """
import sys, numpy as np, hicache_ray
from hicache_ray.faults.chaos import tell_when_noticed  # noqa: E402
from hicache_ray.testing.serving import ask
group = hicache_ray.connect("nodes", address=sys.argv[1]).group("a")
while True:
    ask(group, np.arange(64, dtype="<u4"))
    print("served", flush=True)
"""


def node_of(group: TPGroup) -> str:
    """The node that the ranks are on."""
    (node,) = {info.node_id for info in ray.get([actor.ping.remote() for actor in group.actors])}
    return str(node)


def hits(group: TPGroup) -> bool:
    """Serves every prompt again; whether all but its last page came from the cache."""
    return all(ask(group, prompt).computed_tokens <= CONFIG.page_size for prompt in PROMPTS)


def time_until(condition: Callable[[], bool], what: str) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    wait_for(condition, what, SECONDS)
    return time.monotonic() - began


def lose_node_of_group(cluster: Cluster, group: TPGroup) -> dict[str, Any]:
    """The ranks' node dies: from its death to the first error, and to the first answer from another node."""
    lost = node_of(group)
    cluster.remove_node(_node(cluster, lost), allow_graceful=False)
    began, noticed = time.monotonic(), list[float]()
    tell_when_noticed(group, lambda: noticed.append(time.monotonic() - began))

    def answered() -> bool:
        try:
            group.step()
        except GroupError:
            return False
        return bool(noticed)  # the ranks outlive their node by a moment

    healed = time_until(answered, "the group to answer")
    return _row(
        "node with all ranks of a group lost", "`GroupRestarted`, to be sent again", noticed[0], healed, hits(group)
    )


def lose_node_of_storage(cluster: Cluster, service: Service, group: TPGroup) -> dict[str, Any]:
    """A node with a storage actor only dies, and another comes: nobody but the pool notices."""
    assert service.storage is not None
    homes = {name: info.node_id for name, info in service.storage.info().items() if info is not None}
    head = ray.get_runtime_context().get_node_id()
    lost = next(node for node in homes.values() if node not in (node_of(group), head))
    member = next(name for name, node in homes.items() if node == lost)
    cluster.remove_node(_node(cluster, lost), allow_graceful=False)
    served = hits(group)
    cluster.add_node(**NODE)

    def back() -> bool:
        info = service.storage.info()[member]  # type: ignore[union-attr]
        return info is not None and info.node_id != lost

    healed = time_until(back, "the storage actor to come back")
    return _row("node with a storage actor lost, two replicas", "none: the copies serve", None, healed, served)


def lose_driver(address: str, group: TPGroup) -> dict[str, Any]:
    """A driver dies in the middle of its requests; another goes on with the same group."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, address], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    for _ in range(SERVED):
        assert driver.stdout.readline() == "served\n"
    driver.kill()
    driver.wait()
    healed = time_until(lambda: bool(group.step()), "a step")
    settle(group)
    return _row(
        "driver killed, detached service",
        "those of that driver have no reader any more: `hicache-ray ctl abort` gives their room back",
        None,
        healed,
        hits(group),
    )


def _node(cluster: Cluster, node_id: str) -> Any:
    return next(node for node in cluster.list_all_nodes() if node.node_id == node_id)


def _row(name: str, effect: str, noticed: float | None, healed: float, ok: bool) -> dict[str, Any]:
    return {"name": name, "effect": effect, "noticed": noticed, "healed": healed, "hits": ok}


def measure() -> list[dict[str, Any]]:
    """All rows, one after the other on one cluster."""
    with tempfile.TemporaryDirectory(prefix="hc") as folder:
        head = {**NODE, "num_cpus": 0, "include_dashboard": False, "temp_dir": folder}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        options = GroupOptions(step_timeout=CONFIG.step_timeout, strategy="STRICT_PACK")
        try:
            with hicache_ray.start(CONFIG, name="nodes", options=options, detached=True) as service:
                group = service.group("a", engine=ENGINE)
                for prompt in PROMPTS:
                    ask(group, prompt)
                settle(group)
                rows = [lose_driver(cluster.address, group), lose_node_of_storage(cluster, service, group)]
                return [*rows, lose_node_of_group(cluster, group)]
        finally:
            ray.shutdown()
            cluster.shutdown()


def main() -> int:
    """Prints the rows; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure()
    for row in rows:
        noticed = "-" if row["noticed"] is None else f"{row['noticed']:.1f} s"
        print(f"| {row['name']} | {row['effect']} | {noticed} | {row['healed']:.1f} s |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(not all(row["hits"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
