"""Keeps a plan going on a service: what is done from outside is done in time, restarted actors get the plan again."""

from __future__ import annotations

import threading
import time

from hicache_ray.testing.fault_target import Identity
from hicache_ray.testing.faults import Firing
from hicache_ray.testing.hooks import Process, ServiceFaults

PERIOD = 0.25
HORIZON_SECONDS = 3600.0


class FaultRunner:
    """Runs beside a test, from `start` to `stop`; the plan's time begins with `start`."""

    def __init__(self, faults: ServiceFaults) -> None:
        self.faults = faults
        self._actions = faults.plan.actions(faults.who, HORIZON_SECONDS)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hicache-faults", daemon=True)
        self._processes: dict[Identity, Process] = {}

    def start(self) -> None:
        """Begin; the plan is in every actor when this returns."""
        self.faults.started = time.time()
        self._processes = self.faults.install(30.0)
        self._thread.start()

    def stop(self) -> None:
        """End the plan, here and in the actors."""
        self._stopped.set()
        self._thread.join(10.0)
        self.faults.remove()

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD):
            self._processes.update(self.faults.install(1.0))
            while self._actions and time.time() >= self.faults.started + self._actions[0].at:
                action = self._actions.pop(0)
                process = self._processes.get(action.who)
                at = time.time()
                if process is not None and self.faults.carry_out(action, process):
                    self.faults.note(Firing(action.fault, str(action.who), action.kind, "", at, process.pid))
