"""Ending the process of a rank or storage actor when it does not answer any more, on whatever node it is."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

logger = logging.getLogger("hicache_ray.processes")

KILL_TIMEOUT = 10.0


RANK, STORAGE = "RankServer", "StorageActor"
"""Classes of the actors whose processes may be ended: Ray names a worker's process after its actor's class."""


def kill_worker(pid: int, actor_class: str = RANK) -> bool:
    """SIGKILL to such an actor's process on this node; True when there was one. Other processes are never touched."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    if f"ray::{actor_class}".encode() not in command:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True


def kill_rank(pid: int, node_id: str) -> None:
    """Ends a rank's process on its node, also one that is stopped or hangs, so that Ray starts the actor again.

    A node that can't be reached takes its processes along; that is logged and no error.
    """
    kill_actor(pid, node_id, RANK)


def kill_actor(pid: int, node_id: str, actor_class: str) -> bool:
    """As `kill_rank`, for an actor of that class; True when there was a process and it was ended."""
    if node_id == ray.get_runtime_context().get_node_id():
        return kill_worker(pid, actor_class)
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    remote: Any = ray.remote(num_cpus=0, max_retries=0)
    task = remote(kill_worker).options(scheduling_strategy=strategy)
    try:
        return bool(ray.get(task.remote(pid, actor_class), timeout=KILL_TIMEOUT))
    except ray.exceptions.RayError as error:
        logger.warning("process %d on node %s could not be ended: %s", pid, node_id, error)
        return False
