"""Which Ray cluster a process works with: the one it is in, one it is told of, or a new one on this machine."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import ray

RAY_ANSWER_SECONDS = 3.0
"""How long a cluster that is named by its address may take to accept a connection."""

_OWN_WORDS = ("auto", "local")
"""Addresses that are looked up instead of connected to."""

_ENDPOINT = re.compile(r"(?:ray://)?(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5})")


class RayAddressError(ConnectionError):
    """What is given as the address of a cluster is none, or no cluster answers there; the text names it."""


class RayStartError(RuntimeError):
    """Ray did not start, or did not let this process in; the text is one sentence with Ray's reason."""


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
        RayAddressError: the address is none, or the cluster it names does not answer.
        RayStartError: Ray did not start.
    """
    if ray.is_initialized():
        return False
    target = _named(address)
    if target:
        check_ray_address(target)
    if target and target != "local":
        _connect(target)
        return False
    arguments: dict[str, Any] = {
        "num_cpus": settings.num_cpus,
        "object_store_memory": settings.object_store_bytes,
        "_temp_dir": settings.temp_dir,
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    with _starting("Ray did not start on this machine"):
        ray.init(address="local", include_dashboard=settings.dashboard, log_to_driver=False, **given)
    return True


def join(address: str | None) -> None:
    """Connects this process to a running cluster: as `enter`, but "auto" instead of a new one."""
    if not ray.is_initialized():
        target = _named(address) or "auto"
        check_ray_address(target)
        _connect(target)


def _named(address: str | None) -> str | None:
    # Ray takes RAY_ADDRESS for "auto" too.
    given = os.environ.get("RAY_ADDRESS")
    return given or address if address in (None, "", "auto") else address


def check_ray_address(address: str) -> None:
    """Checks an address before Ray has it, which would try for minutes or fail with a traceback.

    Raises:
        RayAddressError: it is none of "auto", "local", HOST:PORT and ray://HOST:PORT, or nothing answers there.
    """
    if address in _OWN_WORDS:
        return
    match = _ENDPOINT.fullmatch(address)
    port = int(match["port"]) if match else 0
    if match is None or not 0 < port < 1 << 16:
        raise RayAddressError(
            f"{address!r} is no address of a Ray cluster: give HOST:PORT, ray://HOST:PORT, auto or local; "
            "without RAY_ADDRESS, the Ray of this machine is used"
        )
    try:
        socket.create_connection((match["host"].strip("[]"), port), timeout=RAY_ANSWER_SECONDS).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RayAddressError(
            f"no Ray cluster answers at {address}: {reason}; without RAY_ADDRESS, the Ray of this machine is used"
        ) from error


def _connect(target: str) -> None:
    with _starting(f"Ray at {target} does not let this process in"):
        try:
            ray.init(address=target, log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            raise RayAddressError(f"no Ray cluster answers at {target}: {' '.join(str(error).split())}") from error


@contextmanager
def _starting(failure: str) -> Iterator[None]:
    """Has a failed `ray.init` leave nothing half up, and says in one sentence what Ray raised.

    Ray replaces the handler of SIGTERM; one that the process had set itself is put back.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        with _interrupt_afterwards():
            yield
    except RayAddressError:
        ray.shutdown()
        raise
    except Exception as error:  # Ray raises plain Exception too, where a process of its own does not come up
        ray.shutdown()
        raise RayStartError(f"{failure}: {' '.join(str(error).split()) or type(error).__name__}") from error
    except BaseException:
        ray.shutdown()
        raise
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _interrupt_afterwards() -> Iterator[None]:
    """Lets the first SIGINT wait for the end of the block; a second one does not wait.

    Ray's core, interrupted while it is being made, crashes when the process exits.
    """
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            before(number, frame)
        interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        before(signal.SIGINT, None)
