"""What must hold of a service at rest: every slot has one owner, replicas are equal, stored pages are whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from hicache_ray.actors.errors import GroupError
from hicache_ray.actors.group import TPGroup
from hicache_ray.faults.client import ChaosClient, ChatSource
from hicache_ray.faults.report import Audit
from hicache_ray.replay.chat import ChatSpec
from hicache_ray.service import Service

SETTLE_SECONDS = 60.0
CALL_SECONDS = 20.0
AFTERWARDS = ChatSpec(sessions=4, turns=3, system=32, turn=16, answer=16)
"""What is served at the end, when nothing is to fail any more."""
AFTERWARDS_SECONDS = 5.0


def settle_group(group: TPGroup, seconds: float = SETTLE_SECONDS) -> bool:
    """Steps a group without requests until nothing is in flight on any rank; False when that takes too long."""

    def idle() -> bool:
        return all(rank["idle"] for rank in group.step().engine)

    return _until(idle, seconds)


def audit(service: Service, groups: Mapping[str, TPGroup], seed: int, *, read_pages: bool = True) -> Audit:
    """Looks at every rank and every storage actor of a service without requests, then serves a little more.

    Args:
        service: with its storage.
        groups: by name.
        seed: of what is served.
        read_pages: compare every stored page with its checksum (not after bytes were flipped on purpose: a damaged page
            that nobody has asked for since lies there until somebody does).
    """
    faults: list[str] = []
    leaked = divergences = served = 0
    for name, group in groups.items():
        try:
            if not settle_group(group):
                faults.append(f"{name}: transfers did not end within {SETTLE_SECONDS:g} s")
            leaked += _leaked(group)
            divergences += _diverged(group)
            group.check_integrity()
            served += _serve_more(name, group, seed, faults)
        except (GroupError, AssertionError) as error:
            faults.append(f"{name}: {error}")
    if service.storage is not None:
        faults += _storage_faults(service, read_pages)
        leaked += _held_in_storage(service)
    return Audit(leaked, divergences, tuple(faults), served)


def _leaked(group: TPGroup) -> int:
    """Pages of L1 and L2 that are neither free nor in the tree."""
    ledgers = [ledger for rank in group.stats() for ledger in rank["ledger"].values()]
    return sum(abs(ledger["total"] - ledger["free"] - ledger["in_tree"]) for ledger in ledgers)


def _diverged(group: TPGroup) -> int:
    """1 when the ranks' trees are different."""
    refs = [actor.__ray_call__.remote(_digest) for actor in group.actors]
    return int(len(set(ray.get(refs, timeout=CALL_SECONDS))) > 1)


def _digest(rank: Any) -> int:
    """Runs in a rank."""
    return int(rank.cache.index.tree.digest())


def _serve_more(name: str, group: TPGroup, seed: int, faults: list[str]) -> int:
    source = ChatSource(AFTERWARDS, seed + 1_000_003)
    client = ChaosClient(
        name, group, source, concurrency=2, step_limit=SETTLE_SECONDS, stepped=lambda group, began: None
    )
    client.start()
    client.join(AFTERWARDS_SECONDS)
    client.drain()
    client.join(SETTLE_SECONDS)
    outcomes = client.outcomes
    if client.is_alive() or outcomes.failed or outcomes.unnamed or outcomes.wrong or not outcomes.ok:
        faults.append(f"{name} does not serve as it should after the last fault: {outcomes}")
    return outcomes.ok


def _storage_faults(service: Service, read_pages: bool) -> list[str]:
    assert service.storage is not None
    audits = service.storage.audit(read_pages=read_pages)
    return [f"storage actor {member}: {text or 'is away'}" for member, text in audits.items() if text != ""]


def _held_in_storage(service: Service) -> int:
    """Slots that are reserved or leased though nobody writes or reads: those of dead clients expire after a while."""
    storage = service.storage
    assert storage is not None

    def held() -> int:
        return sum(stats.reserved + stats.leased for stats in storage.stats().values() if stats is not None)

    _until(lambda: held() == 0, SETTLE_SECONDS)
    return held()


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.02)
    return True
