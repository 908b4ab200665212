"""What must hold of a service at rest: every slot has one owner, replicas are equal, stored pages are whole."""

from __future__ import annotations

from collections.abc import Mapping

from hicache_ray.deadline import wait_until
from hicache_ray.faults.client import ChaosClient, endless_chat
from hicache_ray.faults.report import Audit
from hicache_ray.rank.group import Group, GroupError
from hicache_ray.replay.chat import ChatSpec
from hicache_ray.replay.driver import RequestSource, Stalled, settle
from hicache_ray.service import Service
from hicache_ray.service_audit import ServiceAudit, audit_service

SETTLE_SECONDS = 60.0
AFTERWARDS = ChatSpec(sessions=4, turns=3, system=32, turn=16, answer=16)
"""What is served at the end, when nothing is to fail any more."""
AFTERWARDS_SECONDS = 5.0


def audit_at_rest(service: Service, groups: Mapping[str, Group], seed: int, *, read_pages: bool = True) -> Audit:
    """Counts everything in a service without requests, once it has served a little more.

    Args:
        service: with its storage.
        groups: by name.
        seed: of what is served.
        read_pages: compare every stored page with its checksum (not after bytes were flipped on purpose: a damaged page
            that nobody has asked for since lies there until somebody does).
    """
    faults = _settle(groups)
    served = sum(_serve_more(name, group, seed, faults) for name, group in groups.items())
    faults += _settle(groups)
    wait_until(lambda: _held_in_storage(service) == 0, SETTLE_SECONDS)  # leases of dead clients expire after a while
    found = audit_service(service, list(groups), read_pages=read_pages)
    return Audit(_leaked(found), _diverged(found), (*faults, *found.faults), served)


def _settle(groups: Mapping[str, Group]) -> list[str]:
    faults = []
    for name, group in groups.items():
        try:
            settle(group, seconds=SETTLE_SECONDS)
        except (GroupError, Stalled) as error:
            faults.append(f"{name}: {error}")
    return faults


def _serve_more(name: str, group: Group, seed: int, faults: list[str]) -> int:
    source = RequestSource(endless_chat(AFTERWARDS, seed + 1_000_003))
    client = ChaosClient(name, group, source, concurrency=2, step_limit=SETTLE_SECONDS)
    client.start()
    client.join(AFTERWARDS_SECONDS)
    client.drain()
    client.join(SETTLE_SECONDS)
    outcomes = client.outcomes
    if client.is_alive() or outcomes.failed or outcomes.unnamed or outcomes.wrong or not outcomes.served:
        faults.append(f"{name} does not serve as it should after the last fault: {outcomes}")
    return outcomes.served


def _leaked(found: ServiceAudit) -> int:
    """Pages of L1 and L2 that are neither free nor in the tree, and slots of L3 that somebody still holds."""
    pools = [pool for ranks in found.groups.values() for rank in ranks for pool in rank["pages"].values()]
    return sum(abs(pool["total"] - pool["free"] - pool["in_tree"]) for pool in pools) + sum(
        member.reserved + member.leased for member in found.storage
    )


def _diverged(found: ServiceAudit) -> int:
    """Groups whose ranks have different trees."""
    return sum(len({rank["digest"] for rank in ranks}) > 1 for ranks in found.groups.values())


def _held_in_storage(service: Service) -> int:
    """Slots that are reserved or leased."""
    if service.storage is None:
        return 0
    return sum(stats.reserved + stats.leased for stats in service.storage.stats().values() if stats is not None)
