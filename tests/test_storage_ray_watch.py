"""A storage actor that hangs is ended by the service's supervisor, and comes back with its pages."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import ray

from hicache_ray.actors.directory import RAY_NAMESPACE
from hicache_ray.cli import run
from hicache_ray.replay.driver import ENGINE, settle
from hicache_ray.service import Service
from hicache_ray.storage.pool.options import actor_name
from hicache_ray.storage.shard.arena import ArenaMapping
from hicache_ray.storage.shard.layout import VALID
from hicache_ray.testing.serving import wait_for
from tests.processes import stop
from tests.ray_service import prompts, serve, service

pytestmark = pytest.mark.ray

DEADLINE = 180.0


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    with service("watched", tp_size=1) as started:
        yield started


def test_a_storage_actor_that_hangs_comes_back_with_its_pages(
    running: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    pool, group = running.storage, running.group("a", engine=ENGINE)
    assert pool is not None
    for prompt in prompts(4, seed=5):
        serve(group, prompt)
    settle(group)
    stored = {member: stats.pages for member, stats in pool.stats().items() if stats is not None}
    before = {member: info.pid for member, info in pool.info().items() if info is not None}
    hung, other = max(stored, key=lambda member: stored[member]), min(stored, key=lambda member: stored[member])
    assert hung != other and stored[hung] > 0
    stop(before[hung])
    try:
        wait_for(lambda: bool(running.supervisor.storage_history()), "the hung actor to be ended", DEADLINE)
    finally:
        with suppress(ProcessLookupError):
            os.kill(before[hung], signal.SIGCONT)
    (heal,) = running.supervisor.storage_history()
    assert (heal.member, heal.pid) == (
        hung,
        before[hung],
    ) and heal.ended_at - heal.silent_at >= running.options.step_timeout
    wait_for(lambda: pool.stats()[hung] is not None, "the actor to be back", DEADLINE)
    infos, stats = pool.info(), pool.stats()
    assert infos[hung].pid != before[hung] and infos[other].pid == before[other]
    assert infos[hung].reopened_pages == stats[hung].pages == stored[hung]
    assert set(pool.audit(read_pages=True).values()) == {""}
    capsys.readouterr()
    assert run(["ctl", "--name", "watched", "heals"]) == 0
    assert f"storage actor {hung}: silent for" in capsys.readouterr().out


def test_a_storage_actor_that_died_is_left_to_ray(running: Service) -> None:
    pool = running.storage
    assert pool is not None
    ended = len(running.supervisor.storage_history())
    member = pool.membership.members[0]
    before = pool.info()[member]
    assert before is not None
    ray.kill(ray.get_actor(actor_name(member), namespace=RAY_NAMESPACE), no_restart=False)

    def is_back() -> bool:
        info = pool.info()[member]
        return info is not None and info.pid != before.pid

    wait_for(is_back, "the actor to be back", DEADLINE)
    assert len(running.supervisor.storage_history()) == ended


def test_ctl_audit_names_member_and_pages_of_a_damaged_arena(
    running: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    """Last: the arena stays damaged."""
    pool, group = running.storage, running.group("b", engine=ENGINE)
    assert pool is not None
    for prompt in prompts(4, seed=6):
        serve(group, prompt)
    settle(group)
    member, info = next((member, info) for member, info in pool.info().items() if info and pool.stats()[member].pages)
    arena = ArenaMapping.attach(Path(info.path), info.arena_id)
    cell = int(np.flatnonzero(arena.headers["state"] == VALID)[0])
    arena.data(int(arena.offsets(np.array([cell]))[0]), 64)[:] ^= 1
    key = arena.headers[cell]["key"][: arena.headers[cell]["key_bytes"]].tobytes().hex()
    capsys.readouterr()
    assert run(["ctl", "--name", "watched", "audit", "--read-pages"]) == 1
    expected = f"storage actor {member}: 1 pages (cell {cell}, key {key}) do not match their checksums"
    assert expected in " ".join(capsys.readouterr().err.split())
