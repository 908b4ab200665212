"""Which Ray cluster a process works with: the one it is in, one it is told of, or a new one on this machine."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from typing import Any

import ray

RAY_ANSWER_SECONDS = 3.0
"""How long a cluster that is named by its address may take to accept a connection."""


@dataclass(frozen=True)
class RayStart:
    """How Ray is started where none runs.

    Attributes:
        num_cpus: CPUs Ray may count on; None: all of the machine.
        object_store_bytes: size of Ray's object store; None: Ray's default.
        temp_dir: Ray's session folder; None: Ray's default.
        dashboard: start Ray's dashboard.
    """

    num_cpus: float | None = None
    object_store_bytes: int | None = None
    temp_dir: str | None = None
    dashboard: bool = False


def enter(address: str | None, settings: RayStart) -> bool:
    """Connects this process to a cluster: the one it is in, else `address`, else `RAY_ADDRESS`, else a new one here.

    Returns:
        Whether a cluster was started for it.

    Raises:
        ConnectionError: the cluster named does not answer.
    """
    if ray.is_initialized():
        return False
    target = address or os.environ.get("RAY_ADDRESS")
    if target:
        check_ray_address(target)
        ray.init(address=target, log_to_driver=False, logging_level=logging.WARNING)
        return False
    arguments: dict[str, Any] = {
        "num_cpus": settings.num_cpus,
        "object_store_memory": settings.object_store_bytes,
        "_temp_dir": settings.temp_dir,
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    ray.init(address="local", include_dashboard=settings.dashboard, log_to_driver=False, **given)
    return True


def join(address: str | None) -> None:
    """Connects this process to a running cluster: as `enter`, but "auto" instead of a new one."""
    if not ray.is_initialized():
        target = address or os.environ.get("RAY_ADDRESS", "auto")
        check_ray_address(target)
        ray.init(address=target, log_to_driver=False, logging_level=logging.WARNING)


def check_ray_address(address: str) -> None:
    """Raises ConnectionError when nothing answers at "host:port": Ray itself would try for minutes.

    Other forms of an address ("auto", "ray://...") are left to Ray.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=RAY_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address}: {error}; without RAY_ADDRESS, the Ray of this machine is used"
        ) from error
