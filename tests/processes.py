"""Stopping other processes, for tests of what hangs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from hicache_ray.deadline import wait_until


def stop(pid: int, seconds: float = 60.0) -> None:
    """Stops a process (SIGSTOP), and returns when none of its threads runs any more: SIGCONT is the caller's."""
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: _stopped(pid), seconds), f"process {pid} was not stopped within {seconds:g} s"


def _stopped(pid: int) -> bool:
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(state in "TtZX" for state in states)
