"""Ending a rank's process when it does not answer any more, on whatever node it is."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import suppress
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

logger = logging.getLogger("hicache_ray.processes")

KILL_TIMEOUT = 10.0


def kill_worker(pid: int) -> bool:
    """SIGKILL to a rank's process on this node; True when there was one. Other processes are never touched."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    if b"ray::RankServer" not in command:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True


def kill_rank(pid: int, node_id: str) -> None:
    """Ends a rank's process on its node, also one that is stopped or hangs, so that Ray starts the actor again.

    A node that can't be reached takes its processes along; that is logged and no error.
    """
    if node_id == ray.get_runtime_context().get_node_id():
        kill_worker(pid)
        return
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(kill_worker).options(scheduling_strategy=strategy)
    try:
        ray.get(task.remote(pid), timeout=KILL_TIMEOUT)
    except ray.exceptions.RayError as error:
        logger.warning("process %d on node %s could not be ended: %s", pid, node_id, error)
