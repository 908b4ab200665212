"""The storage pool (L3) as its driver sees it: starts and stops the actors, changes who is a member, counts, audits.

Clients (`RayPoolStorage`) need only the pool's name: they find its members in the directory and the actors by name.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hicache_ray.actors.directory import forget_locations
from hicache_ray.actors.storage_actor import (
    ACTOR_OPTIONS,
    StorageActor,
    StorageActorInfo,
    StorageActorSpec,
    StoragePoolConfig,
    actor_exists,
)
from hicache_ray.deadline import Deadline
from hicache_ray.storage.pool.channel import ChannelError, Pending
from hicache_ray.storage.pool.membership import Membership
from hicache_ray.storage.pool.options import DEFAULT_POOL, actor_name
from hicache_ray.storage.pool.ray_channel import DirectoryConflict, PoolDirectory, RayChannel
from hicache_ray.storage.pool.rebalance_plan import BalanceReport
from hicache_ray.storage.pool.wire import Reply
from hicache_ray.storage.shard.files import SHARED_MEMORY, arenas_of, remove_if_unlocked
from hicache_ray.storage.shard.grants import ShardStats, namespace_label
from hicache_ray.storage.shard.layout import ArenaLocked

logger = logging.getLogger("hicache_ray.actors.storage_pool")

MEMBER_CALL_SECONDS = 30.0
ACTOR_STOP_SECONDS = 10.0
BALANCE_POLL_SECONDS = 0.1
CHANGES_TRIED = 5


class StoragePoolError(RuntimeError):
    """A pool that can't be started, found or changed."""


class StoragePoolHandle(NamedTuple):
    """Where a pool is found; can be passed to actors and other processes."""

    name: str
    namespace: str

    def options(self, **more: Any) -> dict[str, Any]:
        """The `StorageConfig.extra` of a "ray" backend on this pool, with further options of that backend."""
        return {"pool": self.name, "namespace": self.namespace, **more}


class Drained(NamedTuple):
    """What became of the pages of a member that left.

    Attributes:
        moved: pages that it brought to members that did not have them.
        left: pages that did not get to all members that should hold them, for want of room or time. With replicas,
            other members may hold them.
    """

    moved: int
    left: int


class StoragePool:
    """A running pool. Made by `start` or `connect`; as a context manager it stops the pool at the end."""

    def __init__(self, handle: StoragePoolHandle, membership: Membership, spec: StorageActorSpec | None = None) -> None:
        self.handle = handle
        self.membership = membership
        self._spec = spec
        self._away: set[str] = set()
        self._actors: dict[str, Any] = {}
        self._published = True
        self._directory = PoolDirectory(handle.name, handle.namespace)

    @classmethod
    def start(cls, config: StoragePoolConfig) -> StoragePool:
        """Start the actors of a new pool and wait until each has its arena.

        Raises:
            StoragePoolError: a pool of that name runs, or an actor can't start (the text says why). Nothing is left.
        """
        handle = StoragePoolHandle(config.name, config.namespace or str(ray.get_runtime_context().namespace))
        if _running(handle) is not None:
            raise StoragePoolError(f"a storage pool {config.name!r} runs in the namespace {handle.namespace!r} already")
        # What a driver that was killed left there.
        PoolDirectory(*handle).remove()
        members = tuple(f"{config.name}-{number}" for number in range(config.actors))
        # Above every epoch of an earlier pool of the name, so that its clients, if any are left, learn of the new one.
        first_epoch = time.time_ns() // 1_000_000
        membership = Membership(first_epoch, members, config.replicas, secrets.token_hex(4))
        pool = cls(handle, membership, StorageActorSpec(config, handle.namespace, membership.token))
        pool._published = False
        try:
            pool._start_actors(members, config.nodes or _living_nodes(), config.start_timeout)
            pool._publish(pool.membership)
        except BaseException as error:
            pool.stop()
            if isinstance(error, DirectoryConflict):
                raise StoragePoolError(str(error)) from error
            raise
        if not config.detached:
            atexit.register(pool.stop)
        return pool

    @classmethod
    def connect(cls, name: str = DEFAULT_POOL, namespace: str | None = None) -> StoragePool:
        """A pool that runs already; StoragePoolError when there is none."""
        handle = StoragePoolHandle(name, namespace or str(ray.get_runtime_context().namespace))
        membership = _running(handle)
        if membership is None:
            raise StoragePoolError(f"there is no storage pool {name!r} in the namespace {handle.namespace!r}")
        return cls(handle, membership)

    def info(self) -> dict[str, StorageActorInfo | None]:
        """What each member says about itself, and each that is leaving; None for one that is away."""
        self._refresh()
        return self._call_all("info")

    def stats(self) -> dict[str, ShardStats | None]:
        """State and counters of each member, and of each that is leaving; None for one that is away."""
        self._refresh()
        return self._call_all("stats")

    def balance(self) -> dict[str, BalanceReport | None]:
        """How far each member, and each that is leaving, is with moving pages; None for one that is away."""
        return self._reports(self._refresh().everyone, MEMBER_CALL_SECONDS)

    def wait_balanced(self, timeout: float = 300.0) -> None:
        """Have all members look at all their pages, and wait until no member has pages left to bring to their owners.
        Pages that an owner has no room for stay where they are (`BalanceReport.left`).

        Raises:
            StoragePoolError: that was not so within `timeout` seconds; the text says what is missing. The work goes on.
        """
        deadline, numbers = Deadline(timeout), dict[str, int]()
        while True:
            membership = self._refresh()
            new = [member for member in membership.everyone if member not in numbers]
            asked = self._call(new, "rebalance", seconds=deadline.remaining())
            numbers.update({member: number for member, number in asked.items() if number is not None})
            reports = self._reports(membership.everyone, deadline.remaining())
            undone = [name for name, report in reports.items() if not _is_done(report, numbers.get(name), membership)]
            if membership.settled and not undone:
                return
            if not deadline.remaining():
                missing = "; ".join(_state(name, reports[name]) for name in undone) or "the pool is not settled"
                raise StoragePoolError(f"the pool was not balanced within {timeout:g} s: {missing}")
            time.sleep(BALANCE_POLL_SECONDS)

    def audit(self, *, read_pages: bool = False) -> dict[str, str | None]:
        """What is wrong with each member's pages: "" when nothing is, None for a member that is away.

        Args:
            read_pages: also compare every page with its checksum.
        """
        return self._call_all("audit", read_pages)

    def clear(self, namespace: str | None = None) -> int:
        """Drop all pages, or those of one namespace label. Returns the number of dropped pages.

        Raises:
            StoragePoolError: members were away; the others are cleared.
        """
        label = None if namespace is None else namespace_label(namespace)
        answers = self._call_all("clear", label)
        away = [member for member, answer in answers.items() if answer is None]
        if away:
            raise StoragePoolError(f"storage actors {', '.join(away)} are away and were not cleared")
        return sum(int.from_bytes(Reply.unpack(answer).payload, "little") for answer in answers.values())

    def add_member(self, node_id: str | None = None, timeout: float = 120.0) -> str:
        """Start one more actor and make it a member. Returns its name. The pages that it owns now are brought to it in
        the background (`wait_balanced`). Until then they are found where they were.

        Raises:
            ValueError: too many changes are under way: `wait_balanced` first.
            StoragePoolError: it can't start, or the membership was changed by somebody else meanwhile.
        """
        numbers = [int(member.rpartition("-")[2]) for member in self._refresh().everyone]
        member = f"{self.handle.name}-{max(numbers) + 1}"
        self._start_actors([member], [node_id] if node_id else _living_nodes(), timeout)
        try:
            self._change(lambda known: known.joined_by(member))
        except BaseException:
            self._end_actors([member])
            raise
        return member

    def remove_member(self, member: str, *, force: bool = False, timeout: float = 300.0) -> Drained:
        """Take an actor out of the pool and end it, once its pages are with the others.

        Args:
            force: do not wait for that; its pages are gone, unless they have other holders. So are those of an actor
                that is dead for good.
            timeout: seconds after which it is ended whatever it still has.

        Raises:
            ValueError: there is no such member, it is the last, or too many changes are under way.
            StoragePoolError: the membership was changed by somebody else meanwhile.
        """
        drained = Drained(0, 0)
        if force or not actor_exists(member, self.handle.namespace):
            self._change(lambda known: known.without(member))
        else:
            drained = self._drain(member, Deadline(timeout))
            if member in self._refresh().everyone:
                logger.warning("storage actor %s is ended with %d pages not moved", member, drained.left)
                self._change(lambda known: known.without(member))
        self._end_actors([member])
        return drained

    def stop(self) -> None:
        """End the actors and delete their arenas. Idempotent, also after `ray.shutdown`."""
        atexit.unregister(self.stop)
        if ray.is_initialized():
            if self._published:
                self._refresh()
                self._directory.remove()
            self._end_actors(dict.fromkeys([*(self.membership.everyone if self._published else ()), *self._actors]))
        self._delete_arenas()

    def __enter__(self) -> StoragePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_actors(self, members: Sequence[str], nodes: Sequence[str], timeout: float) -> None:
        spec = self._known_spec()
        remote: Any = ray.remote
        actor_class = remote(**ACTOR_OPTIONS)(StorageActor)
        for member, node in zip(members, itertools.cycle(nodes), strict=False):
            options = actor_class.options(
                name=actor_name(member),
                namespace=self.handle.namespace,
                lifetime="detached" if spec.pool.detached else None,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
            )
            try:
                # Kept: an actor that is not detached ends with the last handle of its maker.
                self._actors[member] = options.remote(dataclasses.replace(spec, member=member))
            except ValueError as error:
                raise StoragePoolError(f"storage actor {member} can't start: {error}") from error
        deadline = Deadline(timeout)
        for member in members:
            while not _ready(member, self._actors[member], deadline):
                time.sleep(0.1)

    def _drain(self, member: str, deadline: Deadline) -> Drained:
        """Have a member leave, and wait until it has left."""

        def report() -> BalanceReport | None:
            return self._reports([member], MEMBER_CALL_SECONDS)[member]

        first = last = report()
        self._change(lambda known: known.left_by(member))
        while member in self._refresh().everyone and deadline.remaining():
            time.sleep(BALANCE_POLL_SECONDS)
            last = report() or last
        last = report() or last
        if last is None:
            return Drained(0, 0)
        has_left = member not in self.membership.everyone
        return Drained(
            max(0, last.moved - (first.moved if first is not None else 0)),
            last.left if has_left else last.to_move or last.left,
        )

    def _refresh(self) -> Membership:
        """The newest membership: the members publish one when they have moved all pages."""
        newest = self._directory.read() if self._published else None
        if newest is not None and newest.token == self.membership.token and newest.epoch > self.membership.epoch:
            self.membership = newest
        return self.membership

    def _change(self, derive: Callable[[Membership], Membership]) -> None:
        """Publish what `derive` makes of the newest membership."""
        for _ in range(CHANGES_TRIED):
            known = self._refresh()
            try:
                self._publish(derive(known))
                return
            except DirectoryConflict as error:
                if self._refresh() != known.settle():
                    raise StoragePoolError(str(error)) from error
        raise StoragePoolError(f"the membership of {self.handle.name!r} changes all the time; try again")

    def _publish(self, membership: Membership) -> None:
        """Write the membership down, then tell the members: clients learn it from them."""
        self._directory.publish(membership)
        told = dict.fromkeys([*membership.everyone, *self.membership.everyone])
        self.membership = membership
        self._published = True
        self._call(list(told), "set_membership", membership.pack(), seconds=MEMBER_CALL_SECONDS)

    def _known_spec(self) -> StorageActorSpec:
        """The spec the members are made from; of a pool that was connected to, a member tells it."""
        if self._spec is None:
            answers = [answer for answer in self._call_all("spec").values() if answer is not None]
            if not answers:
                raise StoragePoolError("no member of the pool answers, so it is not known how to make one")
            self._spec = answers[0]
        return self._spec

    def _reports(self, members: Sequence[str], seconds: float) -> dict[str, BalanceReport | None]:
        """How far each member is; None for one that is away."""
        answers = self._call(members, "balance", seconds=seconds)
        return {
            member: None if answer is None else BalanceReport.unpack(Reply.unpack(answer).payload)
            for member, answer in answers.items()
        }

    def _call_all(self, method: str, *args: Any) -> dict[str, Any]:
        """The answers of all members and those that are leaving, asked at once; None for one that gave none."""
        return self._call(self.membership.everyone, method, *args, seconds=MEMBER_CALL_SECONDS)

    def _call(self, members: Sequence[str], method: str, *args: Any, seconds: float) -> dict[str, Any]:
        calls: dict[str, Pending] = {}
        answers: dict[str, Any] = dict.fromkeys(members)
        for member in members:
            with self._noting_away(member):
                channel = RayChannel(actor_name(member), self.handle.namespace, MEMBER_CALL_SECONDS)
                calls[member] = channel.call(method, *args)
        deadline = Deadline(min(seconds, MEMBER_CALL_SECONDS))
        for member, call in calls.items():
            with self._noting_away(member):
                answers[member] = call.result(deadline.remaining())
                self._away.discard(member)
        return answers

    @contextmanager
    def _noting_away(self, member: str) -> Iterator[None]:
        """Calls a member; that it is away is said once, until it has answered again."""
        try:
            yield
        except ChannelError as error:
            logger.log(logging.DEBUG if member in self._away else logging.WARNING, "%s is away: %s", member, error)
            self._away.add(member)

    def _end_actors(self, members: Iterable[str]) -> None:
        for member in members:
            try:
                handle = ray.get_actor(actor_name(member), namespace=self.handle.namespace)
            except ValueError:
                continue
            try:
                ray.get(handle.shut_down.remote(), timeout=ACTOR_STOP_SECONDS)
            except ray.exceptions.RayError as error:
                logger.warning("storage actor %s did not delete its arena, it is swept later: %s", member, error)
            ray.kill(handle, no_restart=True)
            forget_locations(actor_name(member))
            self._actors.pop(member, None)
            deadline = Deadline(ACTOR_STOP_SECONDS)
            # Its name is free for another actor only then.
            while actor_exists(member, self.handle.namespace) and deadline.remaining():
                time.sleep(0.02)

    def _delete_arenas(self) -> None:
        """Delete what dead actors of this pool left on this node; waits for those that are dying."""
        folder = Path(self._spec.pool.folder) if self._spec is not None else SHARED_MEMORY
        deadline = Deadline(ACTOR_STOP_SECONDS)
        for path in arenas_of(folder, self.membership.token):
            while True:
                try:
                    remove_if_unlocked(path)
                    break
                except ArenaLocked:
                    if not deadline.remaining():
                        logger.warning("the arena %s still has an owner, it is swept later", path)
                        break
                time.sleep(0.05)


def _ready(member: str, actor: Any, deadline: Deadline) -> bool:
    """Whether a new actor answers; False when it is away for the moment. StoragePoolError when it will not answer."""
    try:
        ray.get(actor.info.remote(), timeout=deadline.remaining())
    except ray.exceptions.GetTimeoutError:
        raise StoragePoolError(f"storage actor {member} was not ready in time: see start_timeout") from None
    except ray.exceptions.ActorUnavailableError:
        return False
    except ray.exceptions.RayError as error:
        raise StoragePoolError(f"storage actor {member} can't start: {error}") from error
    return True


def _running(handle: StoragePoolHandle) -> Membership | None:
    """The membership of the pool of that name, None when it has no actors (any more)."""
    membership = PoolDirectory(*handle).read()
    if membership is None or not any(actor_exists(member, handle.namespace) for member in membership.members):
        return None
    return membership


def _living_nodes() -> list[str]:
    """Ids of the nodes, this process's first."""
    own = ray.get_runtime_context().get_node_id()
    living = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return sorted(living, key=lambda node: (node != own, node))


def _is_done(report: BalanceReport | None, number: int | None, membership: Membership) -> bool:
    """Whether a member that was asked for the look of that number has ended it and has nothing left to do."""
    if report is None or number is None:
        return False
    return report.clean and report.finished >= number and report.epoch == membership.epoch


def _state(member: str, report: BalanceReport | None) -> str:
    if report is None:
        return f"{member} is away"
    if report.away:
        return f"{member} can't reach {', '.join(report.away)}"
    return f"{member} has {report.to_move} pages to move"
