"""A fault plan on a running service: every actor carries out its part, and kills and stops come from outside.

faults = ServiceFaults(service, plan)
faults.install()       # again whenever actors may have been restarted: they come up without the plan
...
faults.remove()

`FaultRunner` does this as long as it runs.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hicache_ray import faultpoints
from hicache_ray.actors.directory import RAY_NAMESPACE, group_name, rank_name, supervisor_name
from hicache_ray.faults.injector import Firing, PlanInjector
from hicache_ray.faults.kinds import KINDS, RANK, STORAGE, SUPERVISOR
from hicache_ray.faults.plan import Action, FaultPlan, Identity
from hicache_ray.storage.pool.options import actor_name

if TYPE_CHECKING:  # it loads torch, and parts of this file run in storage actors, which do without
    from hicache_ray.service import Service

logger = logging.getLogger("hicache_ray.faults.service")

FIRINGS_NAMESPACE = b"hicache_ray.faults"
"""Namespace of the keys in Ray's internal KV that hold the firings of all plans."""
CALL_SECONDS, START_SECONDS, REMOVE_SECONDS = 2.0, 30.0, 30.0
LOOK_SECONDS = 0.25
"""Between two looks at all actors: so exact is when a storage actor or the supervisor is found to answer again."""
HORIZON_SECONDS = 3600.0
"""How long a `FaultRunner` does things from outside unless told otherwise."""

_BESIDE = {RANK: "health", STORAGE: "ctl", SUPERVISOR: "status"}
"""Concurrency group in which an actor of each role answers beside its work."""

_ACTOR_TITLES = (b"ray::RankServer", b"ray::StorageActor", b"ray::SupervisorServer")
"""How the processes of a service call themselves: no other process is ever sent a signal."""


class ActorProcess(NamedTuple):
    """Where a process of the service is now."""

    pid: int
    node_id: str


class ServiceFaults:
    """A plan on the actors of a service: its groups' ranks, its storage actors, its supervisor.

    Args:
        service: whose actors.
        plan: what happens; it begins when this object is made.
    """

    def __init__(self, service: Service, plan: FaultPlan) -> None:
        self.who = processes_of(service)
        self.plan = plan.resolved(self.who)
        self.started = time.time()
        self._service = service
        self._ended = False
        self._id = uuid.uuid4().hex[:12]

    def install(self, seconds: float = CALL_SECONDS) -> dict[Identity, ActorProcess]:
        """Puts the plan into every actor that answers within so many seconds, and tells where each of these is.

        An actor that has the plan already keeps it. Faults that happened to an actor before it was restarted count.
        After `end` the actors only tell where they are.
        """
        if self._ended:
            return self._answers({one: self.call(one, _remove) for one in self.who}, seconds)
        spent: dict[str, Counter[int]] = {}
        for firing in self.firings():
            spent.setdefault(firing.who, Counter())[firing.fault] += 1
        mapping = self.plan.as_mapping()
        calls = {
            one: self.call(one, _install, self._id, mapping, str(one), self.started, spent.get(str(one), {}))
            for one in self.who
        }
        return self._answers(calls, seconds)

    def end(self, seconds: float = REMOVE_SECONDS) -> None:
        """Ends the plan in every actor that answers in time; `firings` still tells what happened."""
        self._ended = True
        self._answers({one: self.call(one, _remove) for one in self.who}, seconds)

    def remove(self, seconds: float = REMOVE_SECONDS) -> None:
        """Ends the plan, and forgets what happened."""
        self.end(seconds)
        _internal_kv_del(self._id.encode(), del_by_prefix=True, namespace=FIRINGS_NAMESPACE)

    def firings(self) -> list[Firing]:
        """All faults that have happened so far, in order of time: at the actors' points, and those given to `note`."""
        found = []
        for key in _internal_kv_list(f"{self._id}/".encode(), namespace=FIRINGS_NAMESPACE):
            value = _internal_kv_get(key, namespace=FIRINGS_NAMESPACE)
            if value is not None:
                found.append(Firing(*msgpack.unpackb(value)))
        return sorted(found, key=lambda firing: firing.at)

    def note(self, firing: Firing) -> None:
        """Adds a fault from outside to `firings`."""
        _write(self._id, firing)

    def call(self, one: Identity, function: Any, *arguments: Any) -> Any:
        """Begins `function(actor's instance, *arguments)` in an actor beside its work. Returns None where there is no
        actor."""
        service = self._service
        names = {
            RANK: rank_name(group_name(service.name, one.group), one.number),
            SUPERVISOR: supervisor_name(service.name),
            STORAGE: actor_name(f"{service.storage.handle.name}-{one.number}") if service.storage else "",
        }
        try:
            handle = ray.get_actor(names[one.role], namespace=RAY_NAMESPACE)
        except ValueError:
            return None
        return handle.__ray_call__.options(concurrency_group=_BESIDE[one.role]).remote(function, *arguments)

    def _answers(self, calls: Mapping[Identity, Any], seconds: float) -> dict[Identity, ActorProcess]:
        """The places that were told within so many seconds."""
        refs = {ref: one for one, ref in calls.items() if ref is not None}
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=seconds) if refs else ([], [])
        answers = {}
        for ref in done:
            try:
                answers[refs[ref]] = ActorProcess(*ray.get(ref, timeout=CALL_SECONDS))
            except (RayError, GetTimeoutError) as error:
                logger.debug("%s does not answer: %s", refs[ref], error)
        return answers


def processes_of(service: Service) -> list[Identity]:
    """The processes of a service: ranks by group, storage actors, the supervisor."""
    ranks = [Identity(RANK, rank, group) for group in service.groups for rank in range(service.config.tp_size)]
    members = service.storage.membership.members if service.storage is not None else ()
    storage = [Identity(STORAGE, int(member.rpartition("-")[2])) for member in members]
    return [*ranks, *storage, Identity(SUPERVISOR)]


def carry_out(action: Action, process: ActorProcess) -> bool:
    """Does something to a process from outside, on whatever node it is: SIGKILL, or SIGSTOP with SIGCONT later.

    Returns:
        Whether the process was there.
    """
    number = KINDS[action.kind].signal
    assert number is not None, "a plan lets nothing happen from outside that has no signal"
    arguments = (process.pid, int(number), action.seconds)
    if process.node_id == ray.get_runtime_context().get_node_id():
        return _signal_worker(*arguments)
    strategy = NodeAffinitySchedulingStrategy(process.node_id, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(_signal_worker).options(scheduling_strategy=strategy)
    try:
        return bool(ray.get(task.remote(*arguments), timeout=10.0))
    except (RayError, GetTimeoutError) as error:
        logger.warning("process %d on node %s could not be reached: %s", process.pid, process.node_id, error)
        return False


def _signal_worker(pid: int, number: int, resume_after: float | None) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if not any(name in command for name in _ACTOR_TITLES):
            return False
        os.kill(pid, number)
    except OSError:
        return False
    if resume_after is not None:
        # By a process of its own: the one that stopped it may be busy, or end, before that.
        subprocess.run(["sh", "-c", f"(sleep {resume_after:.3f}; kill -CONT {pid}) >/dev/null 2>&1 &"], check=True)
    return True


def _install(
    actor: Any, plan_id: str, mapping: dict[str, Any], who: str, started: float, spent: Counter[int]
) -> tuple[int, str]:
    """Runs in the actor."""
    if getattr(faultpoints.installed(), "plan_id", None) != plan_id:
        # What happens is noted in Ray's internal KV, where it outlives the process.
        note = partial(_write, plan_id)
        plan, identity = FaultPlan.parse(mapping), Identity.parse(who)
        faultpoints.install(PlanInjector(plan, identity, plan_id=plan_id, started=started, spent=spent, note=note))
    return _place()


def _remove(actor: Any) -> tuple[int, str]:
    """Runs in the actor."""
    faultpoints.install(None)
    return _place()


def _place() -> tuple[int, str]:
    return os.getpid(), ray.get_runtime_context().get_node_id()


def _write(plan_id: str, firing: Firing) -> None:
    key = f"{plan_id}/{firing.fault}/{firing.who}/{firing.at:.6f}"
    _internal_kv_put(key.encode(), msgpack.packb(list(firing)), namespace=FIRINGS_NAMESPACE)


class FaultRunner:
    """Keeps a plan going on a service, from `start` to `stop`. The plan's time begins with `start`.

    Faults from outside happen at their times. Actors that were restarted get the plan again.

    Args:
        faults: the plan on its service.
        seconds: faults from outside later than so many seconds after the start are left out.
        acted: called with each fault from outside; None: `faults.note`.
        told: called with each of them in words, also with one that found no process.
        looked: called after each look at all actors with the time it began and the actors that answered.
    """

    def __init__(
        self,
        faults: ServiceFaults,
        *,
        seconds: float = HORIZON_SECONDS,
        acted: Callable[[Firing], None] | None = None,
        told: Callable[[str], None] = lambda text: None,
        looked: Callable[[float, Mapping[Identity, ActorProcess]], None] = lambda began, answers: None,
    ) -> None:
        self.faults = faults
        self._actions = faults.plan.actions(faults.who, seconds)
        self._acted = acted or faults.note
        self._told = told
        self._looked = looked
        self._processes: dict[Identity, ActorProcess] = {}
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=target, name="hicache-faults", daemon=True)
            for target in (self._act_in_time, self._look_often)
        ]

    def start(self) -> None:
        """Begin; the plan is in every actor when this returns."""
        self.faults.started = time.time()
        self._look(START_SECONDS)
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Returns when all faults from outside have happened."""
        self._threads[0].join()

    def stop(self) -> None:
        """End the plan, here and in the actors."""
        self._stopped.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(10.0)
        self.faults.remove()

    def _act_in_time(self) -> None:
        for action in self._actions:
            if self._stopped.wait(max(0.0, self.faults.started + action.at - time.time())):
                return
            process = self._processes.get(action.who)
            what = f"{action.at:7.1f} s  {action.kind} {action.who}"
            if process is None or not carry_out(action, process):
                self._told(f"{what}: it is away already")
                continue
            self._acted(Firing(action.fault, str(action.who), action.kind, "", time.time(), process.pid))
            self._told(f"{what} (process {process.pid})")

    def _look_often(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            self._look(1.0)

    def _look(self, seconds: float) -> None:
        began = time.time()
        answers = self.faults.install(seconds)
        self._processes.update(answers)
        self._looked(began, answers)
